// InfiniGen: what is chosen by estimates, against the definition. skewing_test.cpp holds the estimates to theirs.

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "scheduler/labels/skewed_cache.hpp"
#include "tests/scheduler/lopsided.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint32_t kHeads = 3;  ///< KV heads of a layer
const AttentionShape kLayer{.layers = 3, .q_heads = kHeads * kGroup, .kv_heads = kHeads, .head_dim = kDim};

/// One policy of a layer with several KV heads, in steps of which each has a number.
class Stage final : public LayerReader {
 public:
  Stage(const std::string& text, std::uint32_t prompt, std::uint32_t most, std::uint32_t seed)
      : spec(parse_policy(text)), n(prompt) {
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      kvs.push_back(FakeKv::random(most, kDim, kGroup, seed + h));
      last_q.push_back(lopsided(std::size_t{std::min(prompt, 40u)} * kGroup, seed + 10 + h));
    }
    begin(prompt);
    ask(seed + 20);
  }
  void begin(std::uint32_t prompt) {
    policy = make_layer_policy(spec, kLayer, kPageTokens, LayerId{2});
    const std::uint32_t queries = std::min(prompt, 40u);
    for (std::uint32_t h = 0; h < kHeads; ++h)
      policy->begin({.kv_head = h, .tokens = prompt, .queries = queries, .last_q = last_q[h], .kv = &kvs[h]});
  }
  /// Other queries, of the next token.
  void ask(std::uint32_t seed) {
    ++number;
    ++n;
    for (auto* all : {&real, &imagined}) {
      all->clear();
      for (std::uint32_t h = 0; h < kHeads; ++h)
        all->push_back(lopsided(kGroup, seed + 3 * h + (all == &imagined ? 1 : 0)));
    }
  }
  [[nodiscard]] std::uint64_t step() const noexcept override { return number; }
  [[nodiscard]] const float* q(std::uint32_t h) const noexcept override { return real[h].data(); }
  [[nodiscard]] const float* rehearsed(std::uint32_t h) const noexcept override { return imagined[h].data(); }
  [[nodiscard]] KvReader& kv(std::uint32_t h) override { return kvs[h]; }

  SelectionRow select(std::uint32_t h) {
    const FakeNear near(n, spec.near.sink_tokens, spec.near.recent_tokens);
    SelectionRow row;
    Bypass bypass;
    SelectCounters counters;
    policy->select({.kv_head = h,
                    .tokens = n,
                    .q = q(h),
                    .rehearsed = rehearsed(h),
                    .near = &near.set,
                    .kv = &kvs[h],
                    .layer = this},
                   row, bypass, counters);
    return row;
  }
  /// Estimates of a head for the tokens before the newest, by a cache of its own: [tokens, group].
  [[nodiscard]] std::vector<float> estimates(std::uint32_t h, std::uint32_t prompt) {
    SkewedCache cache(spec.skewed_share, kLayer);
    const auto queries = static_cast<std::uint32_t>(last_q[h].size() / kDim / kGroup);
    cache.begin({.kv_head = h, .tokens = prompt, .queries = queries, .last_q = last_q[h], .kv = &kvs[h]});
    cache.follow(n - 1, kvs[h]);
    std::vector<float> scores(std::size_t{n - 1} * kGroup);
    cache.estimate(spec.rehearsed ? rehearsed(h) : q(h), n - 1, kvs[h], scores.data());
    return scores;
  }
  /// How many tokens each head keeps, by the definition.
  [[nodiscard]] std::uint32_t fetches(std::uint32_t prompt) {
    double sum = 0.0;
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const std::vector<float> scores = estimates(h, prompt);
      for (std::uint32_t g = 0; g < kGroup; ++g) {
        float best = -HUGE_VALF;
        for (std::size_t i = g; i < scores.size(); i += kGroup) best = std::fmax(best, scores[i]);
        for (std::size_t i = g; i < scores.size(); i += kGroup) sum += scores[i] > best - spec.budget.alpha ? 1 : 0;
      }
    }
    const double cap = std::max(std::round(double{spec.budget.share} * n), double(spec.budget.min_tokens));
    return static_cast<std::uint32_t>(std::min(std::max(std::floor(sum / (kHeads * kGroup)), 1.0), cap));
  }

  PolicySpec spec;
  std::unique_ptr<LayerPolicy> policy;
  std::uint32_t n;  ///< tokens that are visible
  std::uint64_t number = 0;
  std::vector<FakeKv> kvs;
  std::vector<std::vector<float>> last_q, real, imagined;
};

const std::string kText =
    "exact | skewed=30% | rehearsed | within=1.5,most=max(1, 20%) | near=0,sinks=0,recent=1 | dense=1";

}  // namespace

TEST_CASE("each query head keeps as many of its best as are near the best on the layer's average", "[infinigen]") {
  const std::string alpha = GENERATE("0.1", "1.5", "3", "30");
  const std::uint32_t prompt = GENERATE(1u, 7u, 300u);
  const bool rehearsed = GENERATE(true, false);
  CAPTURE(alpha, prompt, rehearsed);
  Stage stage("exact | skewed=30% | within=" + alpha + ",most=max(1, 20%) | near=0,sinks=0,recent=1 | dense=1" +
                  (rehearsed ? " | rehearsed" : ""),
              prompt, prompt + 40, 21);
  for (std::uint32_t i = 0; i < 30; ++i, stage.ask(100 + 10 * i)) {
    const std::uint32_t k = stage.fetches(prompt);
    CAPTURE(stage.n, k);
    for (std::uint32_t j = 0; j < kHeads; ++j) {
      const std::uint32_t h = (i + j) % kHeads;  // Whoever comes first.
      const SelectionRow row = stage.select(h);
      REQUIRE(row.scores.empty());
      REQUIRE(stage.policy->heap_bytes(h) <= policy_state_bytes(stage.spec, kLayer, stage.n + 1) / (2 * kHeads));
      const std::vector<float> scores = stage.estimates(h, prompt);
      for (std::uint32_t g = 0; g < kGroup; ++g)
        REQUIRE(attended_by(row, g) ==
                best(positions(0, stage.n - 1), k, [&](std::uint32_t t) { return scores[t * kGroup + g]; }));
    }
  }
}

TEST_CASE("heads that choose at once choose what they do one after the other", "[infinigen]") {
  const std::uint32_t prompt = 700;
  Stage apart(kText, prompt, prompt + 60, 31), together(kText, prompt, prompt + 60, 31);
  for (std::uint32_t i = 0; i < 50; ++i) {
    std::vector<SelectionRow> rows(kHeads);
    {
      std::vector<std::jthread> threads;
      for (std::uint32_t h = 0; h < kHeads; ++h) threads.emplace_back([&, h] { rows[h] = together.select(h); });
    }
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const SelectionRow want = apart.select(h);
      REQUIRE(rows[h].tokens == want.tokens);
      REQUIRE(rows[h].members == want.members);
    }
    apart.ask(200 + i);
    together.ask(200 + i);
  }
}

TEST_CASE("a larger alpha keeps no fewer tokens, and the largest all", "[infinigen]") {
  std::uint32_t before = 0;
  for (const char* alpha : {"0.001", "0.5", "1", "2", "3", "5", "9", "1000"}) {
    Stage stage(std::string("exact | skewed=30% | within=") + alpha + ",most=100% | near=0,sinks=0,recent=1", 200, 210,
                41);
    const auto kept = static_cast<std::uint32_t>(attended_by(stage.select(0), 0).size());
    CAPTURE(alpha, kept, before);
    REQUIRE(kept >= before);
    before = kept;
  }
  REQUIRE(before == 200);
}

TEST_CASE("with all channels and the real query it is the exact best tokens", "[infinigen]") {
  Stage stage("exact | skewed=100% | rehearsed | within=2,most=30% | near=0,sinks=0,recent=1 | dense=1", 250, 260, 51);
  stage.imagined = stage.real;
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    const SelectionRow row = stage.select(h);
    for (std::uint32_t g = 0; g < kGroup; ++g) {
      const auto kept = attended_by(row, g);
      double least = HUGE_VAL, left = -HUGE_VAL, longest = 0.0;
      for (std::uint32_t t = 0; t + 1 < stage.n; ++t) {
        const double logit = stage.kvs[h].logit(stage.q(h), g, t);
        const bool in = std::ranges::binary_search(kept, t);
        (in ? least : left) = in ? std::min(least, logit) : std::max(left, logit);
        longest = std::max(longest, std::abs(logit));
      }
      REQUIRE(!kept.empty());
      REQUIRE(least >= left - longest / 64.0);  // Keys are rounded to bf16.
    }
  }
}

TEST_CASE("the rehearsed query decides, not the real one", "[infinigen]") {
  Stage a(kText, 200, 210, 61), b(kText, 200, 210, 61);
  b.real[0] = lopsided(kGroup, 999);
  REQUIRE(a.select(0).tokens == b.select(0).tokens);
  b.ask(5);
  a.ask(5);
  b.imagined[0] = lopsided(kGroup, 999);
  REQUIRE(a.select(0).tokens != b.select(0).tokens);
}

TEST_CASE("what a rehearsal lacks is said", "[infinigen]") {
  Stage stage(kText, 50, 60, 71);
  const FakeNear near(stage.n, 0, 1);
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
  HeadContext context{.tokens = stage.n, .q = stage.q(0), .near = &near.set, .kv = &stage.kvs[0], .layer = &stage};
  REQUIRE_THROWS_WITH(stage.policy->select(context, row, bypass, counters),
                      Catch::Contains("rehearsed queries") && Catch::Contains("left out"));
  context.rehearsed = stage.rehearsed(0);
  context.layer = nullptr;
  REQUIRE_THROWS_WITH(stage.policy->select(context, row, bypass, counters), Catch::Contains("all heads of a layer"));
}

TEST_CASE("keys and rehearsed queries that are no numbers come last", "[infinigen]") {
  Stage stage("exact | skewed=30% | rehearsed | within=1000,most=60 | near=0,sinks=0,recent=1 | dense=1", 99, 110, 81);
  for (std::uint32_t c = 0; c < kDim; ++c) stage.kvs[1].k[std::size_t{20} * kDim + c] = kNaN;
  stage.begin(99);
  const SelectionRow row = stage.select(1);
  for (std::uint32_t g = 0; g < kGroup; ++g) {
    const auto kept = attended_by(row, g);
    REQUIRE(kept.size() == 60);
    REQUIRE_FALSE(std::ranges::binary_search(kept, 20u));
  }
  stage.ask(9);
  std::ranges::fill(stage.imagined[0], kNaN);  // Counts nothing, keeps as many as the others.
  REQUIRE(attended_by(stage.select(0), 0).size() == attended_by(stage.select(1), 0).size());
  stage.ask(10);
  for (auto& q : stage.imagined) std::ranges::fill(q, kNaN);
  REQUIRE(attended_by(stage.select(2), 0).size() == 1);
}

TEST_CASE("a prompt of one token, or none", "[infinigen]") {
  Step one("exact | skewed=30% | within=4 | near=0,sinks=0,recent=1", 2);
  const FakeNear near(2, 0, 1);
  one.policy->select({.tokens = 2, .q = one.q.data(), .near = &near.set, .kv = &one.kv}, one.row, one.bypass,
                     one.counters);
  REQUIRE(one.row.tokens == std::vector<std::uint32_t>{0});
  // The newest is attended whatever is near.
  FakeKv kv = FakeKv::random(40, kDim, kGroup, 5);
  const auto policy = make("exact | skewed=30% | within=2,most=10 | near=0,sinks=0,recent=0");
  policy->begin({.kv = &kv});
  for (std::uint32_t n = 1; n <= 40; ++n) {
    const std::vector<float> q = random_queries(kGroup, kDim, n);
    const FakeNear none(n, 0, 0);
    const SelectionRow row = select(*policy, kv, n, q, none.set).row;
    REQUIRE(row.tokens.back() == n - 1);
    REQUIRE(row.members.back() == 0xfu);
    const auto first = attended_by(row, 0);
    const auto k = static_cast<std::uint32_t>(first.size() - 1);
    REQUIRE(k <= 10);
    std::vector<std::uint32_t> want =
        best(positions(0, n - 1), k, [&](std::uint32_t t) { return kv.logit(q.data(), 0, t); });
    want.push_back(n - 1);
    REQUIRE(first == want);
  }
  REQUIRE(policy->heap_bytes(0) == 0);
}

TEST_CASE("a step that comes again with another token before it reads that one's key", "[infinigen]") {
  const std::uint32_t prompt = 80;
  Stage stage(kText, prompt, prompt + 10, 91);
  (void)stage.select(0);
  const std::uint32_t token = prompt;  // Decoded now.
  for (const float size : {50.f, -50.f, 50.f}) {
    stage.n = prompt + 1;
    stage.ask(92);
    for (std::uint32_t c = 0; c < kDim; ++c) {
      const float q = stage.imagined[0][c];
      stage.kvs[0].k[std::size_t{token} * kDim + c] = q > 0.f ? size : -size;
    }
    const auto kept = attended_by(stage.select(0), 0);
    REQUIRE(std::ranges::binary_search(kept, token) == (size > 0.f));
  }
}
