// What history keeps of a prompt and of steps, and the candidates that follow from it, held against the tables as
// written.
#include <limits>

#include "tests/scheduler/history_twins.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("the prompt fills both tables as equation 4 says", "[history]") {
  const std::uint32_t init = GENERATE(1u, 5u, 32u);
  CAPTURE(init);
  const float decay = GENERATE(0.95f, 0.5f);
  Twins twins(400, init, {.decay = decay, .init_queries = init});
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const double stationary = 0.5 / (1.0 - decay);
    REQUIRE(twins.history.vertical(h).sum() == Approx(stationary).epsilon(kSumError));
    REQUIRE(twins.history.slash(h).sum() == Approx(stationary).epsilon(kSumError));
    REQUIRE(twins.history.vertical(h).size() == 396);
    for (std::uint32_t i = 0; i < 396; ++i) {
      REQUIRE(twins.history.vertical(h).score(i) == Approx(twins.naive[h].vertical.s[i]).epsilon(kOnce).margin(1e-9));
      REQUIRE(twins.history.slash(h).score(i) == Approx(twins.naive[h].slash.s[i]).epsilon(kOnce).margin(1e-9));
    }
  }
}

TEST_CASE("prompts shorter than the initial queries use the rows there are", "[history]") {
  const std::uint32_t prompt = GENERATE(5u, 6u, 17u);  // 5: one token beyond the sinks
  CAPTURE(prompt);
  Twins twins(prompt, prompt - kSinks);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(twins.history.vertical(h).sum() == Approx(10.0).epsilon(kSumError));
    REQUIRE(twins.history.slash(h).sum() == Approx(10.0).epsilon(kSumError));
    for (std::uint32_t i = 0; i < prompt - kSinks; ++i) {
      REQUIRE(twins.history.slash(h).score(i) == Approx(twins.naive[h].slash.s[i]).epsilon(kOnce).margin(1e-9));
    }
  }
}

TEST_CASE("prompts without a token beyond the sinks, or without queries, leave the history blank", "[history]") {
  const std::uint32_t prompt = GENERATE(0u, 1u, 4u, 300u);
  CAPTURE(prompt);
  PatternKv kv(kGroup, habit);
  GroupHistory history({}, kGroup, kSinks);
  history.begin({.kv_head = 0, .tokens = prompt, .queries = 0, .last_q = {}, .kv = &kv});
  history.forecast(prompt + 1);
  REQUIRE(history.blank());
  REQUIRE(members(history.expanded(0)).empty());
}

TEST_CASE("candidates and expansion follow the naive tables over 300 steps", "[history]") {
  const float alpha = GENERATE(0.1f, 0.3f);
  CAPTURE(alpha);
  Twins twins(600, 32, {.alpha = alpha});
  std::size_t proposed = 0;
  for (int step = 0; step < 300; ++step) {
    twins.forecast();
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      CAPTURE(step, h);
      const NaiveHistory& naive = twins.naive[h];
      REQUIRE(naive.vertical.s.size() == twins.n - kSinks);
      const double tau_v = naive.vertical.threshold(alpha), tau_s = naive.slash.threshold(alpha);
      const std::vector<std::uint32_t> candidates = twins.candidates(h, alpha);
      for (std::uint32_t j = kSinks; j < twins.n; ++j) {
        const double v = naive.sv(j), s = naive.ss(j, twins.n);
        const bool unclear = std::abs(v - tau_v) < 2 * kError * tau_v || std::abs(s - tau_s) < 2 * kError * tau_s;
        const bool is = std::binary_search(candidates.begin(), candidates.end(), j);
        if (!unclear) REQUIRE(is == (v > tau_v || s > tau_s));
      }
      const auto expected = naive.expanded(twins.n, candidates);
      const auto expanded = members(twins.history.expanded(h));
      // A difference is allowed only where a score equals its mean to rounding.
      std::vector<std::uint32_t> differ;
      std::set_symmetric_difference(expected.begin(), expected.end(), expanded.begin(), expanded.end(),
                                    std::back_inserter(differ));
      const double mv = naive.vertical.mean(), ms = naive.slash.mean();
      for (const std::uint32_t j : differ) {
        const bool unclear =
            std::abs(naive.sv(j) - mv) < 2 * kError * mv || std::abs(naive.ss(j, twins.n) - ms) < 2 * kError * ms;
        REQUIRE(unclear);
      }
      proposed += candidates.size();
    }
    twins.observe();
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      REQUIRE(twins.history.vertical(h).sum() == Approx(10.0).epsilon(kSumError));
      REQUIRE(twins.history.slash(h).sum() == Approx(10.0).epsilon(kSumError));
    }
  }
  REQUIRE(proposed > 600);  // The loop compared something.
}

TEST_CASE("scores that are not finite do not poison the tables", "[history]") {
  Twins twins(300, 32);
  twins.forecast();
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const double before = twins.history.vertical(0).score(50 - kSinks);

  SECTION("beside finite ones they weigh nothing") {
    twins.history.observe(0, std::vector<std::uint32_t>{50, 60, 70, 80}, std::vector<float>{nan, 2.f, inf, -inf});
    REQUIRE(twins.history.vertical(0).sum() == Approx(10.0).epsilon(kSumError));
    REQUIRE(twins.history.vertical(0).score(50 - kSinks) == Approx(0.95 * before).epsilon(1e-5));
  }
  SECTION("alone, or with nothing at all, they change nothing") {
    twins.history.observe(0, std::vector<std::uint32_t>{50, 60}, std::vector<float>{nan, -inf});
    twins.history.observe(0, {}, {});
    REQUIRE(twins.history.vertical(0).score(50 - kSinks) == before);
    REQUIRE(twins.history.vertical(0).sum() == Approx(10.0).epsilon(kSumError));
  }
}
