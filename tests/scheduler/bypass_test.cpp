// What a bypassed head is taken to attend, by hand, and what bypassing does to a policy.
#include "tests/scheduler/bypass_support.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kGroup = 2;
const AttentionShape kShape{.layers = 1, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

struct Prompt {
  explicit Prompt(std::uint32_t tokens, std::uint32_t seed = 1)
      : kv(FakeKv::random(tokens + 1, kDim, kGroup, seed)),
        last_q(random_queries(std::size_t{3} * kGroup, kDim, seed + 7)) {
    context = {.kv_head = 0, .tokens = tokens, .queries = 3, .last_q = last_q, .kv = &kv};
  }
  [[nodiscard]] const float* last_query(std::uint32_t h) const { return last_q.data() + (2 * kGroup + h) * kDim; }
  FakeKv kv;
  std::vector<float> last_q;
  PromptContext context;
};

}  // namespace

TEST_CASE("the estimated mean logit is the mean logit, for any query", "[bypass]") {
  const std::uint32_t n = GENERATE(5u, 6u, 1000u, 3000u);
  Prompt prompt(n);
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  const auto q = random_queries(std::size_t{10} * kGroup, kDim, 5, 3.f);
  for (std::uint32_t i = 0; i < 10; ++i) {
    double mean = 0.0;
    for (std::uint32_t t = kSinks; t < n; ++t)
      mean += prompt.kv.logit(q.data() + i * kGroup * kDim, 1, t) / (n - kSinks);
    REQUIRE(bypass.logits(1, q.data() + (i * kGroup + 1) * kDim).mean == Approx(mean).epsilon(1e-6).margin(1e-7));
  }
}

TEST_CASE("a multiple of the last prompt query has exactly the variance of its logits", "[bypass]") {
  const double c = GENERATE(1.0, -2.0, 0.25);
  Prompt prompt(1500);
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= static_cast<float>(c);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    double mean = 0.0, variance = 0.0;
    for (std::uint32_t t = kSinks; t < 1500; ++t) mean += prompt.kv.logit(q.data(), h, t) / (1500 - kSinks);
    for (std::uint32_t t = kSinks; t < 1500; ++t)
      variance += std::pow(prompt.kv.logit(q.data(), h, t) - mean, 2) / (1500 - kSinks);
    REQUIRE(bypass.logits(h, q.data() + h * kDim).variance == Approx(variance).epsilon(1e-5));
  }
}

TEST_CASE("a head is bypassed only if all rows would, each with a mass of its own", "[bypass]") {
  const std::uint32_t n = 801;
  Prompt prompt(n + 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;
  aim_sinks(prompt.kv, q.data(), 12.0);  // Head 0 only.
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  const FakeNear near(n, kSinks, 6);
  const auto heads_with = [&](const std::vector<float>& behind, Bypass& out) {
    SelectCounters counters;
    return bypass.test(
        {.kv_head = 0, .tokens = n, .q = q.data(), .behind = behind, .near = &near.set, .kv = &prompt.kv}, out,
        counters);
  };
  std::vector<float> same(q);
  for (float& x : same) x *= 1.1f;
  std::vector<float> behind(same);
  behind.insert(behind.end(), q.begin(), q.end());
  Bypass out;
  REQUIRE(heads_with(behind, out) == 1u);
  REQUIRE(out.lse.size() == 3 * kGroup);
  for (std::uint32_t row = 0; row < 3; ++row) {
    const std::vector<float>& own = row == 1 ? same : q;
    Bypass alone;
    SelectCounters counters;
    REQUIRE(bypass.test({.kv_head = 0, .tokens = n + row, .q = own.data(), .near = &near.set, .kv = &prompt.kv}, alone,
                        counters) == 1u);
    REQUIRE(out.lse[row * kGroup] == alone.lse[0]);
    REQUIRE(std::equal(alone.out.begin(), alone.out.begin() + kDim, out.out.begin()));
  }
  // One of them looks elsewhere.
  for (std::uint32_t c = 0; c < kDim; ++c) behind[kGroup * kDim + c] = -q[c];
  REQUIRE(heads_with(behind, out) == 0u);
  REQUIRE(out.heads == 0u);
}

TEST_CASE("a bypassed head's output is r * vsink + (1 - r) * vbar", "[bypass]") {
  const std::uint32_t n = 801;
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;          // Flat logits: variance far below 6.
  aim_sinks(prompt.kv, q.data(), 12.0);  // Head 0 only: the other head's query points elsewhere.
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);

  const FakeNear near(n, kSinks, 0);
  Bypass out;
  SelectCounters counters;
  const HeadContext head{.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv};
  REQUIRE(bypass.test(head, out, counters) == 1u);
  REQUIRE(out.heads == 1u);
  REQUIRE(counters.scored == kSinks + kLocal);

  const Attended sink = attend(prompt.kv, q.data(), 0, positions(0, kSinks));
  const auto estimate = bypass.logits(0, q.data());
  const double global = (n - kSinks) * std::exp(estimate.mean + estimate.variance / 2);
  const double local = attend(prompt.kv, q.data(), 0, positions(n - kLocal, n)).mass;
  const double r = sink.mass / (sink.mass + std::max(global, local));
  REQUIRE(r > 0.85);
  const MergeWeights merged = merge_weights(static_cast<float>(std::log(sink.mass)), out.lse[0]);
  REQUIRE(merged.a == Approx(r).epsilon(1e-5));
  for (std::uint32_t c = 0; c < kDim; ++c) {
    double mean = 0.0;
    for (std::uint32_t t = kSinks; t < n - 1; ++t) mean += prompt.kv.v[t * kDim + c] / (n - 1.0 - kSinks);
    REQUIRE(out.out[c] == Approx(mean).epsilon(1e-5).margin(1e-6));
  }
  // The estimate is good where it is trusted: the true mass beyond the sinks.
  REQUIRE(global == Approx(attend(prompt.kv, q.data(), 0, positions(kSinks, n)).mass).epsilon(0.1));
}

TEST_CASE("a near set beyond the sinks scales the estimate to what is far", "[bypass]") {
  const std::uint32_t n = 801;
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;
  aim_sinks(prompt.kv, q.data(), 14.0);
  SinkBypass bypass(0.85f, kShape, kSinks, 0);
  bypass.begin(prompt.context);
  const auto lse = [&](const FakeNear& near) {
    Bypass out;
    SelectCounters counters;
    (void)bypass.test({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv}, out, counters);
    REQUIRE(out.heads == 1u);
    return out.lse[0];
  };
  const float all_far = lse(FakeNear(n, kSinks, 0));
  const float some = lse(FakeNear(n, kSinks, 61));
  REQUIRE(std::exp(some - all_far) == Approx((797.0 - 61.0) / 797.0).epsilon(1e-4));
  REQUIRE(lse(FakeNear(n, kSinks, n)) == kEmptyLse);
}

TEST_CASE("the rest is what the larger of both estimates says", "[bypass]") {
  const std::uint32_t n = 801;
  const bool near_wins = GENERATE(false, true);
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;
  if (near_wins) aim(prompt.kv, q.data(), n - 1, n, 9.0);  // 8,100, where all others have some 850.
  aim(prompt.kv, q.data(), 0, kSinks, 12.0);
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  const auto estimate = bypass.logits(0, q.data());
  const double global = (n - kSinks) * std::exp(estimate.mean + estimate.variance / 2);
  const double local = attend(prompt.kv, q.data(), 0, positions(n - kLocal, n)).mass;
  REQUIRE((local > global) == near_wins);
  const FakeNear near(n, kSinks, 0);
  const Bypass out = tested(bypass, prompt.kv, q, n, near);
  REQUIRE(out.heads == 1u);
  REQUIRE(out.lse[0] == Approx(std::log(std::max(global, local))).epsilon(1e-4));
}

TEST_CASE("logits too peaked for the log-normal mean are not bypassed, whatever the sinks hold", "[bypass]") {
  const std::uint32_t n = 801;
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 4.f;
  for (std::uint32_t t = n - kLocal; t < n; ++t) std::fill_n(prompt.kv.k.begin() + t * kDim, kDim, 0.f);
  aim(prompt.kv, q.data(), 0, kSinks, GENERATE(5.0, 40.0));  // 119 times the last five tokens, and all there is.
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  REQUIRE(bypass.logits(0, q.data()).variance > 6.0);
  const FakeNear near(n, kSinks, 0);
  REQUIRE((tested(bypass, prompt.kv, q, n, near).heads & 1u) == 0u);
}

TEST_CASE("the guards of a bypass are where they are set", "[bypass]") {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  Prompt prompt(100);
  FakeKv longer = FakeKv::random(400, kDim, kGroup, 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 4.f;
  aim(longer, q.data(), 0, kSinks, 60.0);
  prompt.context.kv = &longer;
  const auto heads = [&](const BypassGuards& guards, std::uint32_t n) {
    SinkBypass bypass(0.85f, kShape, kSinks, kLocal, guards);
    bypass.begin(prompt.context);
    const FakeNear near(n, kSinks, 0);
    return tested(bypass, longer, q, n, near).heads & 1u;
  };
  SinkBypass plain(0.85f, kShape, kSinks, kLocal);
  plain.begin(prompt.context);
  const auto variance = static_cast<float>(plain.logits(0, q.data()).variance);
  REQUIRE(variance > 6.f);
  REQUIRE(heads({}, 101) == 0u);
  REQUIRE(heads({.variance = kNone}, 101) == 1u);
  REQUIRE(heads({.variance = variance * 1.001f}, 101) == 1u);
  REQUIRE(heads({.variance = variance * 0.999f}, 101) == 0u);
  // 96 tokens of the prompt beyond the sinks.
  REQUIRE(heads({.variance = kNone}, 197) == 0u);
  REQUIRE(heads({.variance = kNone, .growth = kNone}, 400) == 1u);
  REQUIRE(heads({.variance = kNone, .growth = 0.f}, 100) == 1u);
  REQUIRE(heads({.variance = kNone, .growth = 0.f}, 101) == 0u);
  REQUIRE(heads({.variance = kNone, .growth = 2.5f}, 100 + 240) == 1u);
  REQUIRE(heads({.variance = kNone, .growth = 2.5f}, 100 + 241) == 0u);
}

TEST_CASE("once most of the context is generated, the prompt's mean and variance bypass nothing", "[bypass]") {
  Prompt prompt(100);
  FakeKv longer = FakeKv::random(400, kDim, kGroup, 1);  // The same keys, and more.
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;
  aim(longer, q.data(), 0, kSinks, 14.0);
  prompt.context.kv = &longer;
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  const auto heads = [&](std::uint32_t n) {
    const FakeNear near(n, kSinks, 0);
    return tested(bypass, longer, q, n, near).heads;
  };
  REQUIRE(heads(101) == 1u);
  REQUIRE(heads(196) == 1u);  // 96 of the prompt beyond the sinks, 96 generated.
  REQUIRE(heads(197) == 0u);
}

TEST_CASE("without a prompt there is no bypass", "[bypass]") {
  Prompt prompt(300);
  SinkBypass bypass(0.01f, kShape, kSinks, kLocal);
  const std::uint32_t tokens = GENERATE(0u, 4u, 300u);
  prompt.context.tokens = tokens;
  prompt.context.queries = tokens == 300 ? 0 : std::min(tokens, 3u);
  bypass.begin(prompt.context);
  const FakeNear near(301, kSinks, 0);
  Bypass out;
  SelectCounters counters;
  REQUIRE(bypass.test({.kv_head = 0, .tokens = 301, .q = prompt.last_query(0), .near = &near.set, .kv = &prompt.kv},
                      out, counters) == 0);
}

TEST_CASE("a bypassed head selects nothing and its history stands still", "[bypass][lfps]") {
  const std::uint32_t tokens = 800;
  constexpr std::uint32_t kSteps = 60;
  const std::string text = GENERATE("lfps", "lfps:share_group=on");
  CAPTURE(text);
  Prompt prompt(tokens + 2 * kSteps);
  prompt.context.tokens = tokens;
  const std::vector<float> loud(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  std::vector<float> q = loud;
  for (float& x : q) x *= 0.3f;
  const std::uint32_t silent = GENERATE(0u, 1u);
  aim_sinks(prompt.kv, q.data() + silent * kDim, 12.0);
  auto policy = make_layer_policy(parse_policy(text), kShape, kPageTokens, LayerId{0});
  policy->begin(prompt.context);
  SelectionRow row;
  Bypass bypass{.heads = 3, .out = {}, .lse = {}};  // Stale from an earlier step.
  std::uint32_t n = tokens;
  const auto select = [&] {
    const FakeNear near(++n, kSinks, 0);
    SelectCounters counters;
    row.clear();
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv}, row, bypass,
                   counters);
  };
  // One silent: what is foreseen becomes another than without what was observed.
  const std::unique_ptr<LayerPolicy> before = policy->clone();
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    select();
    REQUIRE(bypass.heads == 1u << silent);
    REQUIRE(attended_by(row, silent).empty());
    REQUIRE(attended_by(row, 1 - silent).size() >= 6);
    REQUIRE(row.members.size() == row.tokens.size());
    policy->observe(0, prompt.kv);
  }
  REQUIRE(proposal(*policy, prompt.kv, loud, n + 1) != proposal(*before, prompt.kv, loud, n + 1));

  // All heads silent: neither candidates nor an update.
  aim_sinks(prompt.kv, q.data(), 12.0);
  std::copy_n(q.begin(), kDim, q.begin() + kDim);  // Now both heads ask what the sinks answer.
  const std::unique_ptr<LayerPolicy> stands = policy->clone();
  for (std::uint32_t step = 1; step < kSteps; ++step) {
    select();
    REQUIRE(bypass.heads == 3u);
    REQUIRE(row.attended() == 0);
    policy->observe(0, prompt.kv);
  }
  REQUIRE(proposal(*policy, prompt.kv, loud, n + 1) == proposal(*stands, prompt.kv, loud, n + 1));
}
