// When planned work runs, by hand.
#include "scheduler/plan/cost_model.hpp"

#include <algorithm>

#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/plan/forward_work.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

// 1 GB/s is 1000 bytes per us.
constexpr LaneRates kRates{
    .device_gbps = 10.0, .link_gbps = 2.0, .cpu_gbps = 1.0, .launch_us = 1.0, .hand_over_us = 3.0};

}  // namespace

TEST_CASE("no work takes no time", "[plan]") { REQUIRE(estimate({}, kRates).empty()); }

TEST_CASE("work beside work takes as long as the longer, and who waits for both comes then", "[plan]") {
  std::vector<WorkItem> items{
      {.stage = Stage::split, .lane = Lane::device, .read = 20'000},                                 // [0, 3]
      {.stage = Stage::attend, .lane = Lane::device, .read = 40'000, .written = 10'000, .after = {0}},  // [3, 9]
      {.stage = Stage::choose_far, .lane = Lane::cpu, .read = 2'000, .after = {0}},                  // [3, 8]
      {.stage = Stage::attend_far, .lane = Lane::cpu, .read = 4'000, .after = {2}},                  // [8, 12]
      {.stage = Stage::promote, .lane = Lane::link, .read = 8'000, .after = {1}},                    // [9, 14]
      {.stage = Stage::merge, .lane = Lane::device, .after = {3, 4}},                                // [14, 15]
  };
  const double want[][2] = {{0, 3}, {3, 9}, {3, 8}, {8, 12}, {9, 14}, {14, 15}};
  const auto times = estimate(items, kRates);
  REQUIRE(times.size() == items.size());
  for (std::size_t i = 0; i < times.size(); ++i) {
    CAPTURE(i);
    REQUIRE(times[i].begin_us == Approx(want[i][0]));
    REQUIRE(times[i].end_us == Approx(want[i][1]));
  }
  // A slower CPU is waited for.
  LaneRates slow = kRates;
  slow.cpu_gbps = 0.1;
  REQUIRE(estimate(items, slow).back().begin_us == Approx(3 + 3 + 20 + 40));
}

TEST_CASE("a lane does one thing at a time, whoever waits for it", "[plan]") {
  const std::vector<WorkItem> items{{.lane = Lane::link, .read = 8'000}, {.lane = Lane::link, .read = 2'000}};
  const auto times = estimate(items, kRates);
  REQUIRE(times[0].end_us == Approx(5.0));
  REQUIRE(times[1].begin_us == Approx(5.0));
  REQUIRE(times[1].end_us == Approx(7.0));
}

TEST_CASE("what a device does not know of itself is taken to be as the host's memory", "[plan]") {
  const LaneRates known = lane_rates({.link_gbps = 50.0, .near_gbps = 3000.0}, 200.0);
  REQUIRE(known.device_gbps == 3000.0);
  REQUIRE(known.link_gbps == 50.0);
  REQUIRE(known.cpu_gbps == 200.0);
  const LaneRates host = lane_rates({}, 20.0);
  REQUIRE(host.device_gbps == 20.0);
  REQUIRE(host.link_gbps == 20.0);
}

TEST_CASE("a forward that has more near is not slower where the device is faster", "[plan]") {
  ForwardRow row = forward_row(parse_policy("exact | int4 | top_k=200 | near=0,sinks=4,recent=60"), 20'000, {});
  row.list = 0;
  const WorkPlace place{.shape = {.layers = 3, .q_heads = 32, .kv_heads = 8, .head_dim = 128},
                        .layout = {.head_dim = 128},
                        .bucket = {.decode_rows = 1}};
  const LaneRates rates = lane_rates({.link_gbps = 50.0, .near_gbps = 3000.0}, 100.0);
  double before = 1e300;
  for (const double near : {0.0, 0.3, 0.9, 1.0}) {
    const auto items = forward_work(place, {&row, 1}, {}, {.near = near});
    const auto times = estimate(items, rates);
    const double end = std::ranges::max(times, {}, &PlannedTime::end_us).end_us;
    CAPTURE(near);
    REQUIRE(end <= before);
    before = end;
  }
}

TEST_CASE("a stage whose kernel was measured costs that, on its own lane alone", "[plan]") {
  LaneRates rates = kRates;
  rates.stage(Stage::append) = {.fixed_us = 4.0, .share = 0.5};
  rates.stage(Stage::attend_far) = {.fixed_us = 7.0, .share = 0.25};
  const std::vector<WorkItem> items{
      {.stage = Stage::append, .lane = Lane::device, .read = 10'000},  // 4 + 10 / 5
      {.stage = Stage::append, .lane = Lane::link, .written = 2'000},  // 1 + 2 / 2
      {.stage = Stage::attend_far, .lane = Lane::cpu, .read = 1'000, .after = {0}},  // 7 + 1 / 0.25
  };
  const auto times = estimate(items, rates);
  REQUIRE(times[0].end_us == Approx(6.0));
  REQUIRE(times[1].end_us == Approx(2.0));
  REQUIRE(times[2].end_us == Approx(6.0 + 11.0));
}

TEST_CASE("a batch costs what one took, and sequences in between their share of that", "[plan]") {
  LaneRates rates = kRates;
  rates.stage(Stage::split) = {.fixed_us = 4.0, .share = 0.5};
  rates.stage(Stage::score) = {.fixed_us = 5.0};
  rates.batch_rows = 5;
  rates.batch_stage(Stage::split) = {.fixed_us = 16.0, .share = 1.0};
  const auto takes = [&](Stage stage, std::uint32_t rows) {
    const WorkItem item{.stage = stage, .lane = Lane::device, .rows = rows, .read = 20'000};
    return estimate({&item, 1}, rates)[0].end_us;
  };
  REQUIRE(takes(Stage::split, 1) == Approx(4.0 + 4.0));
  REQUIRE(takes(Stage::split, 2) == Approx(0.75 * 8.0 + 0.25 * 18.0));
  REQUIRE(takes(Stage::split, 5) == Approx(16.0 + 2.0));
  REQUIRE(takes(Stage::split, 32) == Approx(16.0 + 2.0));
  REQUIRE(takes(Stage::score, 5) == Approx(takes(Stage::score, 1)));  // No batch was measured of that.
  rates.batch_rows = 0;
  REQUIRE(takes(Stage::split, 5) == Approx(8.0));
}
