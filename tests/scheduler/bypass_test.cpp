#include "scheduler/policy/bypass.hpp"

#include "tests/scheduler/fakes.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kDim = 16;
constexpr std::uint32_t kGroup = 2;
constexpr std::uint32_t kSinks = 4;
constexpr std::uint32_t kLocal = 5;
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

/// Makes every sink key answer q[h] with this logit.
void aim_sinks(FakeKv& kv, const float* q, double logit) {
  double square = 0.0;
  for (std::uint32_t c = 0; c < kDim; ++c) square += static_cast<double>(q[c]) * q[c];
  for (std::uint32_t t = 0; t < kSinks; ++t) {
    for (std::uint32_t c = 0; c < kDim; ++c) {
      kv.k[t * kDim + c] = static_cast<float>(q[c] * logit * std::sqrt(static_cast<double>(kDim)) / square);
    }
  }
}

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
  // Page 0 holds the sinks, page 25 one token; of the 797 offloaded, 28 + 32 + 1 are near.
  const float some = lse(FakeNear(n, kSinks, 0, {0, 3, 25}));
  REQUIRE(std::exp(some - all_far) == Approx((797.0 - 61.0) / 797.0).epsilon(1e-4));
  REQUIRE(lse(FakeNear(n, kSinks, n)) == kEmptyLse);
}

TEST_CASE("peaked heads are judged by their local tokens, never by the log-normal mean", "[bypass]") {
  const std::uint32_t n = 801;
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 4.f;
  for (std::uint32_t t = n - kLocal; t < n; ++t) std::fill_n(prompt.kv.k.begin() + t * kDim, kDim, 0.f);  // A_loc = 5
  aim_sinks(prompt.kv, q.data(), 5.0);  // A_sink = 4 e^5 = 594
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin(prompt.context);
  const auto estimate = bypass.logits(0, q.data());
  REQUIRE(estimate.variance > 6.0);
  REQUIRE((n - kSinks) * std::exp(estimate.mean + estimate.variance / 2) > 4 * std::exp(5.0));  // would not bypass
  const FakeNear near(n, kSinks, 0);
  Bypass out;
  SelectCounters counters;
  REQUIRE((bypass.test({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv}, out, counters) &
           1u) == 1u);
  REQUIRE(out.lse[0] == Approx(std::log(5.0)).epsilon(1e-4));
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
  const std::uint32_t n = 801;
  const std::string text = GENERATE("lfps", "lfps:share_group=on");
  CAPTURE(text);
  Prompt prompt(n - 1);
  std::vector<float> q(prompt.last_q.end() - kGroup * kDim, prompt.last_q.end());
  for (float& x : q) x *= 0.3f;
  const std::uint32_t silent = GENERATE(0u, 1u);
  aim_sinks(prompt.kv, q.data() + silent * kDim, 12.0);
  auto policy = make_layer_policy(parse_policy(text), kShape, kPageTokens, LayerId{0});
  policy->begin(prompt.context);
  const FakeNear near(n, kSinks, 0);
  SelectionRow row;
  Bypass bypass{.heads = 3, .out = {}, .lse = {}};  // Stale from an earlier step.
  SelectCounters counters;
  policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv}, row, bypass,
                 counters);
  REQUIRE(bypass.heads == 1u << silent);
  REQUIRE(attended_by(row, silent).empty());
  REQUIRE(attended_by(row, 1 - silent).size() >= 6);
  REQUIRE(row.members.size() == row.tokens.size());

  // All heads silent: neither candidates nor an update. One silent: the forecast changes.
  std::vector<HotPage> before, after;
  policy->forecast(0, n, 100, before);
  policy->observe(0, prompt.kv);
  policy->forecast(0, n, 100, after);
  double change = 0.0;
  for (const HotPage& page : after) change += page.heat;
  for (const HotPage& page : before) change -= page.heat;
  REQUIRE(std::abs(change) > 0.0);

  aim_sinks(prompt.kv, q.data(), 12.0);
  std::copy_n(q.begin(), kDim, q.begin() + kDim);  // Now both heads ask what the sinks answer.
  row.clear();
  policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &prompt.kv}, row, bypass,
                 counters);
  REQUIRE(bypass.heads == 3u);
  REQUIRE(row.attended() == 0);
  policy->observe(0, prompt.kv);
  std::vector<HotPage> last;
  policy->forecast(0, n, 100, last);
  REQUIRE(last.size() == after.size());
  for (std::size_t i = 0; i < last.size(); ++i) REQUIRE(last[i].heat == after[i].heat);
}
