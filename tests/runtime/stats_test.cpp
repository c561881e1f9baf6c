#include "sluice/stats.hpp"

#include <cmath>
#include <limits>

#include "tests/support/catch.hpp"

using sluice::ShareHistogram;
using sluice::Stats;

TEST_CASE("a percentile is the value below which that share of the samples lies", "[stats]") {
  ShareHistogram histogram;
  REQUIRE(histogram.percentile(0.5) == 0.0);
  for (int i = 0; i < 100; ++i) histogram.add(i / 100.0);
  REQUIRE(histogram.count() == 100);
  REQUIRE(histogram.mean() == Approx(0.495));
  REQUIRE(histogram.percentile(0.05) == Approx(0.04).margin(0.001));
  REQUIRE(histogram.percentile(0.5) == Approx(0.49).margin(0.001));
  REQUIRE(histogram.percentile(1.0) == Approx(0.99).margin(0.001));
  REQUIRE(histogram.min() == 0.0);
  REQUIRE(histogram.share_above(0.0) == 1.0);
  REQUIRE(histogram.share_above(0.9) == Approx(0.1).margin(0.011));
  REQUIRE(ShareHistogram().share_above(0.5) == 0.0);
}

TEST_CASE("what is no share is clamped, and NaN covers nothing", "[stats]") {
  ShareHistogram histogram;
  histogram.add(1.0 + 1e-6);
  histogram.add(-1.0);
  histogram.add(std::numeric_limits<double>::quiet_NaN());
  REQUIRE(histogram.count() == 3);
  REQUIRE(histogram.mean() == Approx(1.0 / 3.0));
  REQUIRE(histogram.percentile(1.0) == Approx(0.999));
}

TEST_CASE("merging adds every counter", "[stats]") {
  // Stats is trivially made of counters and one histogram: any counter that merge forgets stays behind.
  Stats one;
  auto* words = reinterpret_cast<std::uint64_t*>(&one);
  const std::size_t counters = offsetof(Stats, coverage) / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < counters; ++i) words[i] = i + 1;
  one.coverage.add(0.5);
  Stats two = one;
  two.merge(one);
  const auto* sums = reinterpret_cast<const std::uint64_t*>(&two);
  for (std::size_t i = 0; i < counters; ++i) {
    CAPTURE(i);
    REQUIRE(sums[i] == 2 * (i + 1));
  }
  REQUIRE(two.coverage.count() == 2);
}
