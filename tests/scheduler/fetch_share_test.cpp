// Where lists of far rows are cut, and what a machine's rates advise.
#include "sluice/step/fetch_share.hpp"

#include <cmath>

#include "scheduler/plan/cost_model.hpp"
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
  REQUIRE(advised_fetch_share({.link_gbps = 50.0, .cpu_gbps = 150.0}) == Approx(0.25));
  // Scattered rows are read at the share of the rate that the stage has.
  scheduler::LaneRates rates{.link_gbps = 50.0, .cpu_gbps = 150.0};
  rates.stage(Stage::attend_far) = {.fixed_us = 6.0, .share = 0.5};
  REQUIRE(advised_fetch_share(rates) == Approx(50.0 / 125.0));
  rates.stage(Stage::fetch) = {.share = 0.4};
  REQUIRE(advised_fetch_share(rates) == Approx(20.0 / 95.0));
  REQUIRE(advised_fetch_share({.link_gbps = 0.0, .cpu_gbps = 150.0}) == 0.f);
  REQUIRE(advised_fetch_share({.link_gbps = 50.0, .cpu_gbps = 0.0}) == 0.f);
}

TEST_CASE("a GPU's link gets the more of what is far the fewer threads there are", "[plan]") {
  using scheduler::fetch_share_of_device;
  REQUIRE(fetch_share_of_device(46.0, 15) == Approx(0.407).margin(0.001));
  REQUIRE(fetch_share_of_device(46.0, 96) > 0.25f);  // They share the same memory.
  REQUIRE(fetch_share_of_device(46.0, 3) > fetch_share_of_device(46.0, 15));
  REQUIRE(fetch_share_of_device(23.0, 15) < fetch_share_of_device(46.0, 15));
  REQUIRE(fetch_share_of_device(1e6, 1) < 1.f);
  REQUIRE(fetch_share_of_device(0.0, 15) == 0.f);
  REQUIRE(fetch_share_of_device(NAN, 15) == 0.f);
  REQUIRE(fetch_share_of_device(46.0, 0) == 0.f);
}
