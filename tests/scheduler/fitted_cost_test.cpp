// Costs of stages from what they took.
#include "scheduler/plan/fitted_cost.hpp"

#include <array>

#include "tests/support/catch.hpp"

using namespace sluice::scheduler;

namespace {

// 10 GB/s: 1e4 bytes per us.
constexpr double kGbps = 10.0;
double time_of(const StageCost& cost, double bytes) { return cost.fixed_us + bytes / (cost.share * kGbps * 1e3); }

}  // namespace

TEST_CASE("a line through times that lie on one is found, whatever its rate", "[plan]") {
  const double rate = GENERATE(0.1, 1.0, 3.0);
  const double fixed = GENERATE(0.0, 2.0, 50.0);
  std::array<CostSample, 3> samples;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].bytes = 1e4 * static_cast<double>(1 + 5 * i);
    samples[i].us = fixed + samples[i].bytes / (rate * kGbps * 1e3);
  }
  const auto cost = fitted_cost(samples, kGbps);
  REQUIRE(cost);
  REQUIRE(cost->fixed_us == Approx(fixed).margin(1e-6));
  REQUIRE(cost->share == Approx(rate));
}

TEST_CASE("short times count as much as long ones", "[plan]") {
  // No line goes through these; all shares of the error are alike, not the microseconds.
  const std::array<CostSample, 3> samples{
      {{.us = 10, .bytes = 1e3}, {.us = 22, .bytes = 1e5}, {.us = 1000, .bytes = 1e7}}};
  const auto cost = fitted_cost(samples, kGbps);
  REQUIRE(cost);
  for (const CostSample& sample : samples) REQUIRE(time_of(*cost, sample.bytes) == Approx(sample.us).epsilon(0.15));
}

TEST_CASE("neither part is negative", "[plan]") {
  const std::array<CostSample, 2> steep{{{.us = 1, .bytes = 1e5}, {.us = 10, .bytes = 2e5}}};
  const auto rising = fitted_cost(steep, kGbps);
  REQUIRE(rising);
  REQUIRE(rising->fixed_us == 0.0);
  REQUIRE(rising->share > 0.0);
  const std::array<CostSample, 2> falling{{{.us = 10, .bytes = 1e5}, {.us = 9, .bytes = 2e5}}};
  const auto flat = fitted_cost(falling, kGbps);
  REQUIRE(flat);
  REQUIRE(flat->fixed_us > 9.0);
  REQUIRE(flat->fixed_us < 10.0);
  REQUIRE(flat->share == kMostCostShare);
}

TEST_CASE("one size tells no rate", "[plan]") {
  const std::array<CostSample, 2> one{{{.us = 9, .bytes = 2e4}, {.us = 9, .bytes = 2e4}}};
  const auto cost = fitted_cost(one, kGbps);
  REQUIRE(cost);
  REQUIRE(cost->share == Approx(1.0));
  REQUIRE(cost->fixed_us == Approx(7.0));
  const std::array<CostSample, 1> fast{{{.us = 1, .bytes = 2e4}}};
  REQUIRE(fitted_cost(fast, kGbps)->fixed_us == 0.0);
  REQUIRE(time_of(*fitted_cost(fast, kGbps), 2e4) == Approx(1.0));
  const std::array<CostSample, 1> empty{{{.us = 3, .bytes = 0}}};
  REQUIRE(fitted_cost(empty, kGbps)->fixed_us == Approx(3.0));
}

TEST_CASE("nothing measured is no cost", "[plan]") {
  REQUIRE_FALSE(fitted_cost({}, kGbps));
  const std::array<CostSample, 1> none{};
  REQUIRE_FALSE(fitted_cost(none, kGbps));
}
