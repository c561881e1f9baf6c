#include "sluice/audit.hpp"

#include <cmath>
#include <limits>

#include "tests/support/catch.hpp"

using sluice::ShareHistogram;

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

TEST_CASE("merged histograms hold the samples of both", "[stats]") {
  ShareHistogram one, two;
  for (int i = 0; i < 50; ++i) one.add(0.25);
  for (int i = 0; i < 50; ++i) two.add(0.75);
  one.merge(two);
  REQUIRE(one.count() == 100);
  REQUIRE(one.mean() == Approx(0.5));
  REQUIRE(one.min() == 0.25);
  REQUIRE(one.percentile(0.25) == Approx(0.25).margin(0.001));
  REQUIRE(one.percentile(0.75) == Approx(0.75).margin(0.001));
}
