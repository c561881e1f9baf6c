// Where lists of far rows are cut, and what a machine's rates advise.
#include "sluice/step/fetch_share.hpp"

#include <cmath>

#include "scheduler/plan/fetch_advice.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;

TEST_CASE("a list is cut at whole units, at the share or below, and short ones are not", "[plan]") {
  static_assert(fetched_rows(1000, kWholeFetchShare) == 1000);
  static_assert(fetched_rows(1000, 0) == 0);
  const std::uint32_t share = GENERATE(0u, 1u, 77u, 90u, 128u, 255u, 256u);
  CAPTURE(share);
  std::uint32_t last = 0;
  for (std::uint32_t far = 0; far < 5000; ++far) {
    const std::uint32_t fetched = fetched_rows(far, share);
    CAPTURE(far, fetched);
    REQUIRE(fetched >= last);
    REQUIRE(std::uint64_t{fetched} * 256 <= std::uint64_t{far} * share);
    if (share == 256) {
      REQUIRE(fetched == far);
    } else if (far < 64) {
      REQUIRE(fetched == 0);
    } else {
      REQUIRE(fetched % 16 == 0);
      REQUIRE((std::uint64_t{fetched} + 16) * 256 > std::uint64_t{far} * share);
    }
    last = fetched;
  }
  REQUIRE(fetched_rows(0x7fff'ffff, 255) == 0x7fff'ffffull * 255 / 256 / 16 * 16);
}

TEST_CASE("a share is the nearest of 256 parts", "[plan]") {
  REQUIRE(fetch_share_of(0.f) == 0);
  REQUIRE(fetch_share_of(0.001f) == 0);
  REQUIRE(fetch_share_of(0.3f) == 77);
  REQUIRE(fetch_share_of(0.5f) == 128);
  REQUIRE(fetch_share_of(0.99f) == 253);
  REQUIRE(fetch_share_of(1.f) == 256);
}

TEST_CASE("the link gets its part of what it and the CPU read together", "[plan]") {
  using scheduler::advised_fetch_share;
  using scheduler::gbps_of_threads;
  REQUIRE(advised_fetch_share(46.0, 160.0) == Approx(0.404).margin(0.001));  // As measured.
  REQUIRE(advised_fetch_share(23.0, 160.0) < advised_fetch_share(46.0, 160.0));
  REQUIRE(advised_fetch_share(46.0, 320.0) < advised_fetch_share(46.0, 160.0));
  REQUIRE(advised_fetch_share(1e6, 1.0) < 1.f);
  for (const double none : {0.0, -1.0, static_cast<double>(NAN)}) {
    REQUIRE(advised_fetch_share(none, 160.0) == 0.f);
    REQUIRE(advised_fetch_share(46.0, none) == 0.f);
  }
  REQUIRE(gbps_of_threads(0) == 0.0);
  REQUIRE(gbps_of_threads(15) == Approx(159.0));
  REQUIRE(gbps_of_threads(1000) == gbps_of_threads(100));  // They share the same memory.
}
