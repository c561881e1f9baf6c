// Confidence of shares, and where answers part.
#include "tools/cli/eval/agreement.hpp"

#include <cmath>
#include <vector>

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

TEST_CASE("answers part at the first token that differs, one that ends early at its end") {
  const std::vector<std::vector<int>> dense{{1, 2, 3}, {1, 2, 3}, {1, 2, 3}, {}};
  const std::vector<std::vector<int>> said{{1, 2, 3}, {1, 9, 3}, {1, 2, 3, 4}, {}};
  const Agreement found = agreement(said, dense);
  REQUIRE(found.same_share == 0.5);
  REQUIRE(found.until_different);
  REQUIRE(*found.until_different == Approx((1.0 + 3.0) / 2));
  REQUIRE_FALSE(agreement(dense, dense).until_different);
  REQUIRE(agreement({}, {}).same_share == 0.0);
}
