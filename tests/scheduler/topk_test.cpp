// Exact top-k, and the selection of the k best that every scored policy shares.

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "scheduler/policy/scored_set.hpp"
#include "sluice/step/order_key.hpp"
#include "sluice/step/top_k.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("keys order values as they are, with what is no number below them", "[topk]") {
  using Limits = std::numeric_limits<float>;
  const float ascending[] = {
      -Limits::infinity(), Limits::lowest(),  -1.f, -Limits::denorm_min(), 0.f, Limits::denorm_min(), 1.f,
      Limits::max(),       Limits::infinity()};
  for (std::size_t i = 1; i < std::size(ascending); ++i) {
    CAPTURE(i);
    CHECK(order_key(ascending[i - 1]) < order_key(ascending[i]));
    CHECK(weighed_key(ascending[i]) == order_key(ascending[i]));
  }
  CHECK(order_key(-0.f) == order_key(0.f));
  CHECK(order_key(ascending[0]) == 0x007f'ffffu);
  CHECK(weighed_key(ascending[0]) == 0);
  for (const float nan : {Limits::quiet_NaN(), -Limits::quiet_NaN()}) {
    CHECK(order_key(nan) == 0);
    CHECK(weighed_key(nan) == 0);
    CHECK(scheduler::candidate_key(nan) == 1);
  }
}

TEST_CASE("top-k keeps the k best of each query head, beyond the sinks", "[topk]") {
  const std::uint32_t n = GENERATE(6u, 100u, 777u, 4099u);
  const std::string budget = GENERATE("budget=1", "budget=64", "budget=max(64, 2%)", "budget=10%", "budget=100%");
  CAPTURE(n, budget);
  Step step("topk:" + budget, n);
  const FakeNear near(n, 4, 0);
  step.select(near.set);
  const std::uint32_t k = budget_tokens(step.spec.budget, n);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(attended_by(step.row, h) == best(positions(4, n), k, step.logit(h)));
  }
}

TEST_CASE("top-k ranks ties by position and NaN below every number", "[topk]") {
  Step step("topk:budget=5", 200);
  std::fill(step.kv.k.begin(), step.kv.k.end(), 0.f);  // All scores are equal, and +0 equals -0.
  std::fill_n(step.kv.k.begin() + 5 * kDim, kDim, -0.f);
  std::fill_n(step.kv.k.begin() + 6 * kDim, kDim, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(step.q.begin(), kDim, 1.f);
  const FakeNear near(200, 4, 0);
  const SelectionRow row = select(*step.policy, step.kv, 200, step.q, near.set).row;
  REQUIRE(attended_by(row, 0) == std::vector<std::uint32_t>{4, 5, 7, 8, 9});
}

TEST_CASE("the largest of a row are those that sorting finds, and of equal ones the first", "[topk]") {
  std::mt19937 rng(5);
  for (int round = 0; round < 400; ++round) {
    const std::size_t count = 1 + rng() % (round % 4 == 0 ? 6'000 : 300);
    const int shape = round % 3;  // continuous, few distinct values, all equal
    std::vector<float> scores(count);
    for (float& s : scores) {
      s = shape == 0   ? std::normal_distribution<float>(0.f, 30.f)(rng)
          : shape == 1 ? static_cast<float>(rng() % 4) - 2.f
                       : -1.5f;
    }
    if (count > 3)
      scores[1] = std::numeric_limits<float>::quiet_NaN(), scores[2] = -std::numeric_limits<float>::infinity();
    std::vector<std::uint32_t> want(count);
    std::iota(want.begin(), want.end(), 0);
    std::ranges::stable_sort(want, std::greater<>(), [&](std::uint32_t i) { return candidate_key(scores[i]); });
    const auto k = static_cast<std::uint32_t>(1 + rng() % (round % 2 == 0 ? count : count / 16 + 1));
    want.resize(k);
    std::ranges::sort(want);
    std::vector<std::uint32_t> got(k);
    REQUIRE(select_top_k(scores.data(), static_cast<std::uint32_t>(count), k, got.data()) == k);
    REQUIRE(got == want);
  }
}

TEST_CASE("coverage of top-k rises with k, and no other set of k has more", "[topk]") {
  const std::uint32_t n = 600;
  double last = 0.0;
  for (const std::uint32_t k : {1u, 8u, 64u, 300u, 596u}) {
    Step step("topk:budget=" + std::to_string(k), n);
    const FakeNear near(n, 4, 0);
    step.select(near.set);
    const auto chosen = attended_by(step.row, 1);
    const double mass = attend(step.kv, step.q.data(), 1, chosen).mass;
    REQUIRE(mass >= last);
    last = mass;
    std::mt19937 rng(k);
    for (int round = 0; round < 20; ++round) {
      auto other = positions(4, n);
      std::shuffle(other.begin(), other.end(), rng);
      other.resize(chosen.size());
      REQUIRE(attend(step.kv, step.q.data(), 1, other).mass <= mass * (1 + 1e-12));
    }
  }
}
