// What a few answers are worth.
#include "tools/cli/eval/statistics.hpp"

#include <cmath>
#include <utility>

#include "tests/support/catch.hpp"

using namespace sluice::tools;

TEST_CASE("Wilson's interval is the set of shares that the hits do not contradict") {
  for (const auto& [hits, trials] : {std::pair(3u, 8u), {7u, 8u}, {31u, 32u}, {60u, 128u}}) {
    CAPTURE(hits, trials);
    const Interval found = wilson(hits, trials);
    const double share = static_cast<double>(hits) / trials;
    REQUIRE(found.low < share);
    REQUIRE(found.high > share);
    // At its ends the share lies 1.96 standard deviations off what that end would give.
    for (const double end : {found.low, found.high})
      REQUIRE(std::abs(share - end) == Approx(1.959964 * std::sqrt(end * (1.0 - end) / trials)).epsilon(1e-6));
  }
  REQUIRE(wilson(8, 8).high == 1.0);
  REQUIRE(wilson(8, 8).low == Approx(0.6756).epsilon(1e-3));
  REQUIRE(wilson(0, 8).low == 0.0);
  REQUIRE(wilson(0, 8).high == Approx(1.0 - 0.6756).epsilon(1e-3));
  REQUIRE(wilson(0, 0).low == 0.0);
  REQUIRE(wilson(0, 0).high == 1.0);
}

TEST_CASE("McNemar's exact test adds up what is at least as uneven, on both sides") {
  REQUIRE(mcnemar(0, 0) == 1.0);
  REQUIRE(mcnemar(3, 3) == 1.0);
  REQUIRE(mcnemar(1, 5) == Approx(2.0 * (1 + 6) / 64));
  REQUIRE(mcnemar(5, 1) == mcnemar(1, 5));
  REQUIRE(mcnemar(0, 10) == Approx(2.0 / 1024));
  REQUIRE(mcnemar(400, 600) < 1e-9);  // Where 2^n is no number.
}
