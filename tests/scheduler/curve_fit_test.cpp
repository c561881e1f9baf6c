// How many tokens hold a share of the mass, by a curve through a few of their scores: Tactic's budget.
#include "scheduler/clusters/curve_fit.hpp"

#include <cmath>
#include <vector>

#include "scheduler/clusters/cluster_source.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kDim = 16;
constexpr std::uint32_t kGroup = 4;
constexpr AttentionShape kShape{.layers = 1, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

/// Sums of max(a / i + b, 0), the long way.
double curve_mass(double a, double b, std::uint32_t begin, std::uint32_t end) {
  double sum = 0.0;
  for (std::uint32_t i = begin + 1; i <= end; ++i) sum += std::max(a / i + b, 0.0);
  return sum;
}

/// Scores whose exponentials are a / i + b at the sampled positions.
std::vector<float> scores_on_curve(double a, double b, const FitSamples& samples, double shift = 0.0) {
  std::vector<float> scores;
  for (const ListRange range : {samples.head, samples.near, samples.far}) {
    for (std::uint32_t i = range.begin; i < range.end; ++i) {
      scores.push_back(static_cast<float>(std::log(a / (i + 1.0) + b) + shift));
    }
  }
  return scores;
}

}  // namespace

TEST_CASE("a list on the curve gives the curve and the exact budget", "[clusters][fit]") {
  const double a = 3'000.0, b = GENERATE(0.5, 0.0, 20.0);
  const double share = GENERATE(0.5, 0.7, 0.9, 0.99);
  const auto n = GENERATE(2'000u, 16'384u, 131'072u);
  CAPTURE(b, share, n);
  const FitSamples samples = fit_samples({}, n);
  REQUIRE(samples.head.size() == static_cast<std::uint32_t>(std::ceil(0.015 * n)));
  const auto mean = [&](ListRange range) { return curve_mass(a, b, range.begin, range.end) / range.size(); };
  const FittedCurve curve = fit_curve(samples.near, mean(samples.near), samples.far, mean(samples.far));
  REQUIRE(std::abs(curve.a - a) < 1e-2 * a);
  REQUIRE(std::abs(curve.b - b) < 1e-2 * (b + a / n));

  const double wanted = share * curve_mass(a, b, 0, n);
  std::uint32_t exact = 0;
  for (double sum = 0.0; sum < wanted;) sum += a / ++exact + b;
  std::vector<float> scores = scores_on_curve(a, b, samples);
  const std::uint32_t budget = fitted_budget(scores, samples, share);
  REQUIRE(std::abs(static_cast<double>(budget) - exact) <= std::max(0.01 * exact, 1.0));

  // Beside the list something is attended anyway that has as much mass as all of it, in four tokens.
  std::vector<float> again = scores_on_curve(a, b, samples);
  std::vector<float> anyway(4, static_cast<float>(std::log(curve_mass(a, b, 0, n) / 4)));
  const double left = 2.0 * share * curve_mass(a, b, 0, n) - curve_mass(a, b, 0, n);
  std::uint32_t less = 0;
  for (double sum = 0.0; sum < left;) sum += a / ++less + b;
  const std::uint32_t beside = fitted_budget(again, samples, share, anyway);
  if (share > 0.5) REQUIRE(std::abs(static_cast<double>(beside) - less) <= std::max(0.01 * less, 1.0));
  if (share == 0.5) REQUIRE(beside <= 1);
}

TEST_CASE("if what is attended anyway holds the share, the list's budget is 0", "[clusters][fit]") {
  const std::vector<float> head{100.f, 50.f, 25.f};
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.5, 175.0) == 0);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.51, 175.0) == 1);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.8, 175.0) == 2);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 1.0, 175.0) == 1'000);
  const std::vector<float> nothing(3, 0.f);
  REQUIRE(fitted_budget(nothing, {.a = 0.0, .b = 0.0}, 1'000, 0.99, 1.0) == 0);
  REQUIRE(fitted_budget(nothing, {.a = 0.0, .b = 0.0}, 1'000, 0.5, 0.0) == 1'000);
  const FitSamples samples = fit_samples({}, 1'000);
  std::vector<float> scores(samples.size(), 0.f);
  std::vector<float> odd(5, std::nanf(""));  // Weighs nothing.
  std::vector<float> plain = scores, beside = scores;
  REQUIRE(fitted_budget(plain, samples, 0.7) == fitted_budget(beside, samples, 0.7, odd));
}

TEST_CASE("budgets grow with the share, from 1 to everything, and do not see a common shift", "[clusters][fit]") {
  const FitSamples samples = fit_samples({}, 5'000);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> scores(samples.size());
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = 4.f * normal(rng) - 0.01f * static_cast<float>(i);
  std::uint32_t before = 1;
  for (const double share : {1e-6, 0.3, 0.5, 0.9, 0.99, 1.0}) {
    std::vector<float> plain = scores, shifted = scores;
    for (float& score : shifted) score += 64.f;
    const std::uint32_t budget = fitted_budget(plain, samples, share);
    const std::uint32_t again = fitted_budget(shifted, samples, share);
    REQUIRE(std::max(budget, again) - std::min(budget, again) <= 1 + budget / 1'000);  // 64 costs bits of the scores.
    REQUIRE(budget >= before);
    before = budget;
  }
  REQUIRE(before == 5'000);
}

TEST_CASE("a curve that falls below zero ends there; one that rises is flat", "[clusters][fit]") {
  const ListRange near{.begin = 90, .end = 110}, far{.begin = 590, .end = 610};
  const FittedCurve falling = fit_curve(near, 20.0, far, 1.0);
  REQUIRE(falling.b < 0.0);
  const std::vector<float> head(15, 25.f);
  const double mass = 15 * 25.0 + curve_mass(falling.a, falling.b, 15, 1'000);
  for (const double share : {0.2, 0.5, 0.9, 0.999}) {
    const std::uint32_t budget = fitted_budget(head, falling, 1'000, share);
    REQUIRE(budget <= -falling.a / falling.b + 1.0);
    const auto held = [&](std::uint32_t k) {
      return 25.0 * std::min(k, 15u) + curve_mass(falling.a, falling.b, 15, std::max(k, 15u));
    };
    REQUIRE(held(budget) >= share * mass * (1.0 - 1e-3));
    REQUIRE(held(budget - 1) <= share * mass * (1.0 + 1e-3));
  }
  const FittedCurve rising = fit_curve(near, 1.0, far, 3.0);
  REQUIRE(rising.a == 0.0);
  REQUIRE(rising.b == 2.0);
}

TEST_CASE("the head's exact weights decide a budget that lies in it", "[clusters][fit]") {
  const std::vector<float> head{100.f, 50.f, 25.f, 0.f, 0.f};
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.5) == 1);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.8) == 2);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 0.0}, 1'000, 0.9) == 3);
  REQUIRE(fitted_budget(head, {.a = 0.0, .b = 1.0}, 105, 0.75) == 5 + 32);  // 275 in all, 31.25 more than the head has
}

TEST_CASE("without mass to tell from, everything is attended; short lists have no samples", "[clusters][fit]") {
  const FitSamples samples = fit_samples({}, 1'000);
  for (const float score : {std::nanf(""), -HUGE_VALF, HUGE_VALF}) {
    std::vector<float> scores(samples.size(), score);
    REQUIRE(fitted_budget(scores, samples, 0.5) == 1'000);
  }
  std::vector<float> some(samples.size(), std::nanf(""));
  some[3] = 1.f;
  REQUIRE(fitted_budget(some, samples, 0.5) == 4);
  REQUIRE(fit_samples({}, 511).tokens == 0);
  REQUIRE(fit_samples({.tokens_per_cluster = 100}, 999).tokens == 0);
  REQUIRE(fit_samples({.tokens_per_cluster = 1, .min_tokens = 0}, 10).tokens == 0);
  for (const std::uint32_t n : {512u, 700u, 5'000u}) {
    const FitSamples of_n = fit_samples({.head_share = 0.0999f}, n);
    REQUIRE(of_n.head.end <= of_n.near.begin);
    REQUIRE(of_n.far.end <= n);
  }
}

/// The check of the specification: keys of topics, sorted by centroid. Gaussian-like scores are no a / x + b, so low
/// shares fall short and high ones overshoot.
TEST_CASE("the estimate reaches its share about as often as published", "[clusters][fit]") {
  constexpr std::uint32_t kTopics = 40, kTokens = 4'000, kQueries = 16;
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  FakeKv kv(kTokens, kDim, kGroup);
  std::vector<float> topics(kTopics * kDim);
  for (float& x : topics) x = normal(rng);
  for (std::uint32_t t = 0; t < kTokens; ++t) {
    const std::uint32_t topic = static_cast<std::uint32_t>(rng() % kTopics);
    for (std::uint32_t c = 0; c < kDim; ++c) kv.k[t * kDim + c] = topics[topic * kDim + c] + 0.6f * normal(rng);
  }
  ClusterSource source({.tokens_per_cluster = 32, .iterations = 4}, kShape);
  source.begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  double reached = 0.0, attended = 0.0;
  for (std::uint32_t query = 0; query < kQueries; ++query) {
    const std::vector<float> q = random_queries(kGroup, kDim, 100 + query, 1.5f);
    source.rank(q.data(), kv);
    const FitSamples samples = fit_samples({}, kTokens);
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      std::vector<std::uint32_t> order;
      for_each_in_order(source.index(), source.order(h), 0, kTokens, [&](auto token, auto) { order.push_back(token); });
      std::vector<float> scores;
      for (const ListRange range : {samples.head, samples.near, samples.far}) {
        for (std::uint32_t i = range.begin; i < range.end; ++i) {
          scores.push_back(static_cast<float>(kv.logit(q.data(), h, order[i])));
        }
      }
      const std::uint32_t budget = fitted_budget(scores, samples, 0.9);
      double held = 0.0, all = 0.0;
      for (std::uint32_t i = 0; i < kTokens; ++i) {
        const double weight = std::exp(kv.logit(q.data(), h, order[i]));
        all += weight;
        held += i < budget ? weight : 0.0;
      }
      reached += held / all / (kQueries * kGroup);
      attended += budget / (1.0 * kTokens * kQueries * kGroup);
    }
  }
  CAPTURE(reached, attended);
  REQUIRE(reached > 0.85);
  REQUIRE(reached < 0.99);
  REQUIRE(attended < 0.7);
}
