// MagicPIG's parts, the policy, and hash tables as a source of other budgets.

#include <map>
#include <numbers>

#include "scheduler/lsh/lsh_source.hpp"
#include "scheduler/policy/policies.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr AttentionShape kOneHead{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = kDim};

/// Keys around a mean that is long beside their spread, as keys of real models are.
FakeKv cone(std::uint32_t tokens, std::uint32_t group, std::uint32_t seed) {
  FakeKv kv = FakeKv::random(tokens, kDim, group, seed);
  for (std::size_t i = 0; i < kv.k.size(); ++i) kv.k[i] += i % kDim < 4 ? 5.f : 0.f;
  return kv;
}

std::vector<std::uint32_t> collisions(LshSource& source, std::uint32_t h, std::uint32_t tokens) {
  TokenSet set;
  set.reset(tokens);
  source.add_collisions(h, set);
  return members(set);
}

/// Sums over queries and seeds, with and without the correction.
struct Sums {
  double error = 0.0;  ///< |o - o_dense|
  double mass = 0.0;   ///< relative to dense attention's
};

Attended weigh(const FakeKv& kv, const float* q, const std::vector<std::uint32_t>& exact, const SelectionRow& row,
               bool corrected) {
  Attended sum{.out = std::vector<double>(kDim, 0.0)};
  const auto add = [&](std::uint32_t token, double score) {
    sum.mass += std::exp(score);
    for (std::uint32_t c = 0; c < kDim; ++c) sum.out[c] += std::exp(score) * kv.v[std::size_t{token} * kDim + c];
  };
  for (const std::uint32_t token : exact) add(token, kv.logit(q, 0, token));
  for (std::size_t i = 0; i < row.tokens.size(); ++i) {
    if ((row.members[i] & 1) == 0) continue;
    add(row.tokens[i], corrected ? row.scores[i * kv.group()] : kv.logit(q, 0, row.tokens[i]));
  }
  for (double& x : sum.out) x /= sum.mass;
  return sum;
}

void add(Sums& sums, const Attended& found, const Attended& dense) {
  sums.error += distance(found.out, dense.out);
  sums.mass += found.mass / dense.mass;
}

/// What the policy attends exactly: near tokens and runs.
std::vector<std::uint32_t> exact_tokens(const SelectionRow& row, const NearSet& near, std::uint32_t n) {
  auto tokens = near_tokens(near, n);
  for (const PageRun& run : row.runs) {
    for (std::uint32_t r = run.begin; r < run.end; ++r) tokens.push_back(run.page * kPageTokens + r);
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

}  // namespace

TEST_CASE("projections are standard normal, seeded and shared", "[lsh]") {
  const auto a = shared_projections(64, {});
  REQUIRE(a == shared_projections(64, {}));
  REQUIRE(a != shared_projections(64, {.seed = 2}));
  REQUIRE(a != shared_projections(128, {}));
  double sum = 0.0, squares = 0.0;
  const std::uint32_t count = a->count() * 64;
  for (std::size_t i = 0; i < count; ++i) {
    sum += a->rows()[i];
    squares += a->rows()[i] * a->rows()[i];
  }
  REQUIRE(std::abs(sum / count) < 0.02);
  REQUIRE(std::abs(squares / count - 1.0) < 0.03);
}

TEST_CASE("hash tables find what comparing all codes finds", "[lsh]") {
  const auto count = GENERATE(0u, 1u, 63u, 64u, 65u, 1'000u);
  const auto bits = GENERATE(1u, 4u, 16u);
  constexpr std::uint32_t kTables = 7;
  std::mt19937 rng(count + bits);
  std::vector<std::uint16_t> codes(std::size_t{kTables} * count);
  for (auto& code : codes) code = static_cast<std::uint16_t>(rng() % std::min(1u << bits, 20u));
  HashTables tables;
  tables.build(codes, count, bits);
  std::vector<std::uint16_t> query(kTables * 2);
  for (auto& code : query) code = static_cast<std::uint16_t>(rng() % std::min(1u << bits, 20u));
  for (const std::uint32_t least : {1u, 2u}) {
    std::vector<std::uint32_t> expected, found;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint32_t meetings = 0;
      for (std::uint32_t t = 0; t < kTables; ++t) meetings += codes[std::size_t{t} * count + i] == query[t * 2 + 1];
      if (meetings >= least) expected.push_back(i);
    }
    tables.for_each_collision(query.data() + 1, 2, least, [&](std::uint32_t item) { found.push_back(item); });
    REQUIRE(found == expected);
  }
}

TEST_CASE("collision probabilities follow the formula, and stay one outside it", "[lsh]") {
  for (const double cosine : {-1.0, -0.3, 0.0, 0.5, 0.9, 1.0}) {
    const double p = std::pow(1.0 - std::acos(cosine) / std::numbers::pi, 10);
    const double none = std::pow(1.0 - p, 150), one = 150 * p * std::pow(1.0 - p, 149);
    REQUIRE(std::abs(collision_probability({}, static_cast<float>(cosine)) - (1.0 - none - one)) < 1e-5);
    REQUIRE(std::abs(collision_probability({.min_collisions = 1}, static_cast<float>(cosine)) - (1.0 - none)) < 1e-5);
  }
  REQUIRE(collision_probability({}, 1.0001f) == 1.f);
  REQUIRE(collision_probability({}, -1.0001f) == 0.f);
  REQUIRE(collision_probability({}, std::nanf("")) == 0.f);
  REQUIRE(collision_probability({.bits = 16, .tables = 1}, 1.f) == 0.f);
}

TEST_CASE("as many keys meet the query as their probabilities say", "[lsh]") {
  LshOptions options;
  options.bits = GENERATE(8u, 10u);
  options.tables = options.bits == 8 ? 75 : 150;
  constexpr std::uint32_t kTokens = 1'500;
  FakeKv kv = cone(kTokens, 1, 21);
  double met = 0.0, expected = 0.0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {  // One draw of projections decides for all keys together.
    options.seed = seed;
    LshSource source(options, kOneHead, 4);
    source.begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
    REQUIRE(source.first() == 4);
    REQUIRE(source.end() == kTokens - 64);
    for (std::uint32_t query = 0; query < 8; ++query) {
      const std::vector<float> q = random_queries(1, kDim, 300 + query);
      source.hash(q.data(), kv);
      met += static_cast<double>(collisions(source, 0, kTokens).size());
      for (std::uint32_t token = source.first(); token < source.end(); ++token) {
        expected += static_cast<double>(source.probability(0, token, static_cast<float>(kv.logit(q.data(), 0, token))));
      }
    }
  }
  CAPTURE(met, expected);
  REQUIRE(std::abs(met - expected) < 0.06 * expected);
}

TEST_CASE("the correction makes the mass right on average and the output nearer to dense attention", "[magicpig]") {
  constexpr std::uint32_t kTokens = 1'500, n = kTokens + 10;
  FakeKv kv = cone(n, kGroup, 23);
  constexpr std::uint64_t kSeeds = 10, kQueries = 6;
  Sums corrected, plain;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    PolicySpec spec = magicpig_spec();
    spec.lsh.bits = 8;
    spec.lsh.tables = 75;
    spec.lsh.seed = seed;
    const auto policy = make_sampled_policy(spec, kShape);
    policy->begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
    const FakeNear near(n, 4, 64);
    for (std::uint32_t query = 0; query < kQueries; ++query) {
      const std::vector<float> q = random_queries(kGroup, kDim, 500 + query, 0.5f);
      const SelectionRow row = select(*policy, kv, n, q, near.set).row;
      const auto exact = exact_tokens(row, near.set, n);
      const Attended dense = attend(kv, q.data(), 0, positions(0, n));
      add(corrected, weigh(kv, q.data(), exact, row, true), dense);
      add(plain, weigh(kv, q.data(), exact, row, false), dense);
    }
  }
  CAPTURE(corrected.error, plain.error, corrected.mass, plain.mass);
  REQUIRE(std::abs(corrected.mass / (kSeeds * kQueries) - 1.0) < 0.1);
  REQUIRE(plain.mass / (kSeeds * kQueries) < 0.8);
  REQUIRE(corrected.error < 0.9 * plain.error);
}

TEST_CASE("a sample of everything at probability 1 is dense attention", "[magicpig]") {
  constexpr std::uint32_t kTokens = 300, n = 310;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 25);
  PolicySpec spec = magicpig_spec();
  spec.lsh.bits = 1;
  spec.lsh.tables = 512;
  spec.lsh.min_collisions = 1;
  const auto policy = make_sampled_policy(spec, kShape);
  policy->begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  const FakeNear near(n, 4, 64);
  const std::vector<float> q = random_queries(kGroup, kDim, 26);
  const auto [row, bypass, counters] = select(*policy, kv, n, q, near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    auto tokens = attended_by(row, h);
    for (const std::uint32_t token : tokens) REQUIRE_FALSE(near.set.contains(token));
    const auto near_ones = near_tokens(near.set, n);
    tokens.insert(tokens.end(), near_ones.begin(), near_ones.end());
    std::sort(tokens.begin(), tokens.end());
    REQUIRE(tokens == positions(0, n));
  }
  for (std::size_t i = 0; i < row.scores.size(); ++i) {
    REQUIRE(std::abs(row.scores[i] - kv.logit(q.data(), i % kGroup, row.tokens[i / kGroup])) < 2e-4);
  }
  REQUIRE(counters.scored == row.tokens.size());
}

TEST_CASE("sinks, the prompt's last tokens and what was generated are attended exactly by all heads", "[magicpig]") {
  const std::uint32_t generated = GENERATE(1u, 200u);
  constexpr std::uint32_t kTokens = 700;
  const std::uint32_t n = kTokens + generated;
  FakeKv kv = cone(n, kGroup, 27);
  const auto policy = make_sampled_policy(magicpig_spec(), kShape);
  policy->begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  REQUIRE_FALSE(policy->wants_observation(0));
  const FakeNear near(n, 4, 64);
  const std::vector<float> q = random_queries(kGroup, kDim, 28);
  const SelectionRow row = select(*policy, kv, n, q, near.set).row;
  auto expected = positions(kTokens - 64, n);
  for (std::uint32_t sink = 0; sink < 4; ++sink) expected.push_back(sink);
  std::sort(expected.begin(), expected.end());
  REQUIRE(exact_tokens(row, near.set, n) == expected);
  REQUIRE(row.members.size() == row.tokens.size());
  for (std::size_t i = 0; i < row.tokens.size(); ++i) {
    REQUIRE((row.tokens[i] >= 4 && row.tokens[i] < kTokens - 64));
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      if (((row.members[i] >> h) & 1) == 0) continue;
      const double plain = kv.logit(q.data(), h, row.tokens[i]);
      REQUIRE(row.scores[i * kGroup + h] >= plain - 1.1e-4);  // Never below: a chance is at most 1.
      REQUIRE(row.scores[i * kGroup + h] <= plain + 9.3);     // -ln 1e-4
    }
  }
}

TEST_CASE("short prompts are dense; a query that meets nothing attends the exact part", "[magicpig]") {
  FakeKv kv = FakeKv::random(400, kDim, kGroup, 29);
  const std::vector<float> q = random_queries(kGroup, kDim, 30);
  const std::uint32_t prompt = GENERATE(0u, 68u, 300u);
  CAPTURE(prompt);
  PolicySpec spec = magicpig_spec();
  spec.lsh.bits = 16;
  spec.lsh.tables = 1;  // Two collisions in one table cannot be.
  const auto policy = make_sampled_policy(spec, kShape);
  policy->begin({.kv_head = 0, .tokens = prompt, .kv = &kv});
  const std::uint32_t n = prompt + 40;
  const FakeNear near(n, 4, 16);
  const SelectionRow row = select(*policy, kv, n, q, near.set).row;
  REQUIRE(row.tokens.empty());
  REQUIRE(row.scores.empty());
  const auto exact = exact_tokens(row, near.set, n);
  if (prompt <= 68) {
    REQUIRE(exact == positions(0, n));
  } else {
    REQUIRE(exact.size() == 4 + 64 + 40);
  }
}

TEST_CASE("hash tables propose tokens to other budgets, uncorrected", "[magicpig]") {
  constexpr std::uint32_t kTokens = 900, n = 920;
  FakeKv kv = cone(n, kGroup, 31);
  PolicySpec spec = magicpig_spec();
  spec.budget = {.kind = BudgetKind::top_k, .min_tokens = 30, .share = 0.f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  const auto policy = make_sparse_policy(spec, kShape, kPageTokens, LayerId{0});
  policy->begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  LshSource source(spec.lsh, kShape, 4);
  source.begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  const std::vector<float> q = random_queries(kGroup, kDim, 32);
  source.hash(q.data(), kv);
  const FakeNear near(n, 4, 0);
  const SelectionRow row = select(*policy, kv, n, q, near.set).row;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    auto candidates = collisions(source, h, n);
    REQUIRE_FALSE(candidates.empty());
    for (std::uint32_t token = source.end(); token < n; ++token) candidates.push_back(token);
    REQUIRE(attended_by(row, h) == best(candidates, 30, [&](std::uint32_t t) { return kv.logit(q.data(), h, t); }));
  }
  for (std::size_t i = 0; i < row.scores.size(); ++i) {
    REQUIRE(row.scores[i] == static_cast<float>(kv.logit(q.data(), i % kGroup, row.tokens[i / kGroup])));
  }
}
