// Tactic as a policy, and clusters as a source of other budgets.

#include "scheduler/clusters/curve_fit.hpp"
#include "scheduler/policy/policies.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// Keys of topics, so that clusters mean something, and a policy after a prompt.
struct Decode {
  explicit Decode(PolicySpec policy_spec, std::uint32_t prompt_tokens, std::uint32_t room = 0)
      : spec(std::move(policy_spec)), prompt(prompt_tokens), kv(FakeKv::random(prompt + room + 1, kDim, kGroup, 3)) {
    std::mt19937 rng(17);
    std::normal_distribution<float> normal;
    std::vector<float> topics(std::size_t{20} * kDim);
    for (float& x : topics) x = normal(rng);
    for (std::size_t i = 0; i < kv.k.size(); ++i) {
      kv.k[i] = topics[i / kDim * 7919 % 20 * kDim + i % kDim] + 0.4f * normal(rng);
    }
    policy = spec.budget.kind == BudgetKind::fitted ? make_fitted_policy(spec, kShape, kPageTokens)
                                                    : make_sparse_policy(spec, kShape, kPageTokens, LayerId{0});
    policy->begin({.kv_head = 0, .tokens = prompt, .queries = 0, .last_q = {}, .kv = &kv});
    q = random_queries(kGroup, kDim, 18, 1.5f);
  }
  void select(std::uint32_t n, const NearSet& near) {
    row.clear();
    counters = {};
    kv.rows_scored = 0;
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near, .kv = &kv}, row, bypass, counters);
    REQUIRE(kv.ascending);
    REQUIRE(std::is_sorted(row.tokens.begin(), row.tokens.end()));
  }
  /// What head `h` attends, near tokens included.
  [[nodiscard]] std::vector<std::uint32_t> attended(const NearSet& near, std::uint32_t n, std::uint32_t h = 0) const {
    auto tokens = attended_by(row, h);
    for (const std::uint32_t token : tokens) REQUIRE_FALSE(near.contains(token));
    const auto near_ones = near_tokens(near, n);
    tokens.insert(tokens.end(), near_ones.begin(), near_ones.end());
    std::sort(tokens.begin(), tokens.end());
    REQUIRE(std::adjacent_find(tokens.begin(), tokens.end()) == tokens.end());
    return tokens;
  }
  [[nodiscard]] double share(std::uint32_t h, const std::vector<std::uint32_t>& tokens, std::uint32_t n) const {
    return attend(kv, q.data(), h, tokens).mass / attend(kv, q.data(), h, positions(0, n)).mass;
  }

  PolicySpec spec;
  std::uint32_t prompt;
  FakeKv kv;
  std::unique_ptr<LayerPolicy> policy;
  std::vector<float> q;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

PolicySpec tactic(float mass = 0.9f) {
  PolicySpec spec = tactic_spec();
  spec.budget.mass = mass;
  return spec;
}

}  // namespace

TEST_CASE("tactic attends about its share of the mass, and the newest tokens all", "[tactic]") {
  const float mass = GENERATE(0.7f, 0.9f);
  Decode decode(tactic(mass), 3'000, 50);
  const std::uint32_t n = 3'040;
  const FakeNear near(n, 0, 0);
  decode.select(n, near.set);
  const auto tokens = decode.attended(near.set, n);
  REQUIRE(decode.row.members.empty());
  REQUIRE(decode.row.scores.empty());
  REQUIRE(is_subset(positions(3'000, n), tokens));
  REQUIRE(tokens.size() < n);
  REQUIRE(decode.counters.candidates == tokens.size());
  REQUIRE(decode.counters.scored == decode.kv.rows_scored);
  REQUIRE(decode.kv.rows_scored <= kGroup * fit_samples(decode.spec.clusters, 3'000).size() + 40);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const double share = decode.share(h, tokens, n);
    REQUIRE(share > mass - 0.1);
    // What renormalisation over a part can be off by.
    const Attended all = attend(decode.kv, decode.q.data(), h, positions(0, n));
    const Attended part = attend(decode.kv, decode.q.data(), h, tokens);
    REQUIRE(distance(all.out, part.out) <= 2.0 * (1.0 - share) * longest_value(decode.kv, n) + 1e-9);
  }
}

TEST_CASE("what tactic attends anyway counts: with enough of the mass there, no cluster is attended", "[tactic]") {
  struct Window {
    std::uint32_t sinks, recent;  ///< near
    std::uint32_t begin, end;     ///< where the mass is
  };
  const std::uint32_t n = 3'040;
  const auto window = GENERATE(Window{0, 0, 3'000, 3'040},     // tokens in no cluster yet
                               Window{4, 0, 1, 2},             // a sink
                               Window{0, 200, 2'900, 3'000},   // the recent window, its older part clustered
                               Window{0, 3'040, 100, 2'000});  // everything
  CAPTURE(window.sinks, window.recent, window.begin);
  Decode decode(tactic(), 3'000, 50);
  std::vector<float> mean(kDim);  // A direction that all queries like: keys along it weigh most for each of them.
  for (std::uint32_t i = 0; i < kGroup * kDim; ++i) mean[i % kDim] += decode.q[i];
  for (std::uint32_t h = 0; h < kGroup; ++h) std::copy(mean.begin(), mean.end(), decode.q.begin() + h * kDim);
  double square = 0.0, others = 0.0;
  for (const float x : mean) square += double{x} * x;
  for (std::uint32_t t = 0; t < n; ++t) {
    if (t < window.begin || t >= window.end) others += std::exp(decode.kv.logit(decode.q.data(), 0, t));
  }
  const double logit = std::log(19.0 * others / (window.end - window.begin));  // 95% of the mass
  for (std::uint32_t t = window.begin; t < window.end; ++t) {
    for (std::uint32_t c = 0; c < kDim; ++c) {
      decode.kv.k[t * kDim + c] = static_cast<float>(mean[c] * logit * std::sqrt(double{kDim}) / square);
    }
  }
  const FakeNear near(n, window.sinks, window.recent);
  decode.select(n, near.set);
  const auto tokens = decode.attended(near.set, n);
  auto expected = near_tokens(near.set, n);
  unite(expected, positions(3'000, n));
  REQUIRE(decode.share(0, expected, n) > 0.949);
  REQUIRE(tokens == expected);
}

TEST_CASE("the more is attended anyway, the less of the clusters, down to what the share leaves", "[tactic]") {
  Decode decode(tactic(0.8f), 3'000, 400);
  std::size_t before = ~std::size_t{0};
  for (const std::uint32_t recent : {0u, 500u, 1'500u, 2'900u}) {
    const std::uint32_t n = 3'001;
    const FakeNear near(n, 0, recent);
    decode.select(n, near.set);
    const auto tokens = decode.attended(near.set, n);
    for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(decode.share(h, tokens, n) > 0.7);
    REQUIRE(decode.row.attended() < before);
    before = decode.row.attended();
  }
}

TEST_CASE("what a group attends holds what each of its heads would", "[tactic]") {
  Decode decode(tactic(), 2'000);
  const FakeNear near(2'001, 0, 0);
  decode.select(2'001, near.set);
  const auto united = decode.attended(near.set, 2'001);
  std::vector<std::uint32_t> together;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    Decode alone(tactic(), 2'000);  // A group of four equal queries wants what the one wants.
    for (std::uint32_t other = 0; other < kGroup; ++other) {
      std::copy_n(decode.q.data() + h * kDim, kDim, alone.q.data() + other * kDim);
    }
    alone.select(2'001, near.set);
    const auto own = alone.attended(near.set, 2'001);
    REQUIRE(is_subset(own, united));
    unite(together, own);
  }
  REQUIRE(together == united);
}

TEST_CASE("a share of 1 and a short prompt are dense attention", "[tactic]") {
  const bool all = GENERATE(true, false);
  const std::uint32_t prompt = all ? 1'000 : 300;
  const std::uint32_t n = prompt + GENERATE(1u, 40u);
  CAPTURE(all, n);
  Decode decode(tactic(all ? 1.f : 0.5f), prompt, 40);
  const FakeNear near(n, 4, 16);
  decode.select(n, near.set);
  REQUIRE(decode.attended(near.set, n) == positions(0, n));
  REQUIRE(decode.bypass.heads == 0);
}

TEST_CASE("new tokens are clustered in the background of the step that brings enough", "[tactic]") {
  PolicySpec spec = tactic(0.5f);
  spec.clusters.recluster_every = 64;
  spec.clusters.min_tokens = 128;
  const std::uint32_t prompt = GENERATE(0u, 640u);
  CAPTURE(prompt);
  Decode decode(spec, prompt, 200);
  std::uint32_t clustered = prompt;
  for (std::uint32_t n = prompt + 1; n <= prompt + 200; ++n) {
    const FakeNear near(n, 0, 0);
    decode.select(n, near.set);
    const auto tokens = decode.attended(near.set, n);
    REQUIRE(is_subset(positions(clustered, n), tokens));
    if (clustered < 10 * spec.clusters.tokens_per_cluster) REQUIRE(tokens == positions(0, n));
    const auto again = tokens;
    decode.select(n, near.set);  // A step that failed is repeated.
    REQUIRE(decode.attended(near.set, n) == again);
    REQUIRE(decode.policy->wants_observation(0) == (n - clustered == 64));
    if (!decode.policy->wants_observation(0)) continue;
    decode.policy->observe(0, decode.kv);
    clustered = n;
    REQUIRE_FALSE(decode.policy->wants_observation(0));
  }
  REQUIRE(clustered == prompt + 192);
}

TEST_CASE("clusters propose tokens to other budgets", "[tactic]") {
  PolicySpec spec = tactic();
  spec.budget = {.kind = BudgetKind::top_k, .min_tokens = 1, .share = 1.f};
  spec.clusters.candidates = 200;
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  Decode decode(spec, 2'000, 30);
  const std::uint32_t n = 2'020;
  const FakeNear near(n, 4, 0);
  decode.select(n, near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto own = attended_by(decode.row, h);
    REQUIRE(is_subset(positions(2'000, n), own));
    REQUIRE(own.size() <= 220);
    REQUIRE(own.size() >= 216);  // but for sinks
    // Similar keys lie together, so most of the best are among the candidates.
    const auto wanted =
        best(positions(4, 2'000), 50, [&](std::uint32_t t) { return decode.kv.logit(decode.q.data(), h, t); });
    std::size_t found = 0;
    for (const std::uint32_t token : wanted) found += std::binary_search(own.begin(), own.end(), token) ? 1 : 0;
    REQUIRE(found >= 25);
  }
  REQUIRE_FALSE(decode.policy->wants_observation(0));
  REQUIRE(decode.row.scores.size() == decode.row.tokens.size() * kGroup);
}

TEST_CASE("a budget of far tokens is first of those in no cluster, then of clusters", "[tactic][far]") {
  const std::uint32_t n = 3'040;
  const FakeNear near(n, 4, 8);
  Decode free(tactic(), 3'000, 50);
  free.select(n, near.set);
  const auto before = free.attended(near.set, n);
  // Of each query head's part 32 are the tokens behind the prompt that are not recent.
  for (const std::uint32_t far : {kGroup * 20, kGroup * 32, kGroup * 100, kGroup * 3'040}) {
    CAPTURE(far);
    PolicySpec spec = tactic();
    spec.far = {.min_tokens = far, .share = 0.f};
    Decode bound(spec, 3'000, 50);
    bound.select(n, near.set);
    const auto tokens = bound.attended(near.set, n);
    REQUIRE(bound.row.attended() <= far);
    REQUIRE(is_subset(tokens, before));
    if (far / kGroup >= 32) REQUIRE(is_subset(positions(3'000, n), tokens));
    if (far / kGroup == 32) REQUIRE(tokens.size() == 4 + 32 + 8);
    if (far / kGroup == 100) REQUIRE(tokens.size() > 4 + 32 + 8);
    if (far / kGroup > 3'000) REQUIRE(tokens == before);
    for (std::uint32_t h = 0; h < kGroup && far / kGroup < 32; ++h) {
      const auto logit = [&](std::uint32_t t) { return bound.kv.logit(bound.q.data(), h, t); };
      REQUIRE(is_subset(best(positions(3'000, n - 8), far / kGroup, logit), tokens));
    }
  }
  // A prompt that is too short for clusters.
  PolicySpec spec = tactic();
  spec.far = {.min_tokens = kGroup * 30, .share = 0.f};
  Decode bound(spec, 400, 1);
  const FakeNear all_far(401, 0, 0);
  bound.select(401, all_far.set);
  REQUIRE(bound.row.attended() <= kGroup * 30);
  REQUIRE(bound.row.attended() >= 30);
}
