// What a machine's stages cost by forwards whose near rows are attended in `split`, or in a launch of their own.
#include "tools/cli/plan/default_costs.hpp"

#include <numeric>
#include <optional>

#include "scheduler/plan/far_advice.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;
using scheduler::StageCosts;

namespace {

constexpr double kGbps = 300.0;  ///< of the device
constexpr AttentionShape kModel{.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

constexpr std::size_t at(Stage stage) { return static_cast<std::size_t>(stage); }

double takes(const StageCosts& costs, Stage stage, double bytes) {
  return costs[at(stage)]->fixed_us + bytes / (costs[at(stage)]->share * kGbps * scheduler::kBytesPerUs);
}

/// What the device's kernels take.
StageCosts kernels(double attend_fixed_us) {
  StageCosts costs{};
  costs[at(Stage::append)] = {.fixed_us = 4.0};
  costs[at(Stage::score)] = {.fixed_us = 5.0, .share = 0.7};
  costs[at(Stage::choose)] = {.share = 0.25};
  costs[at(Stage::split)] = {.fixed_us = 12.0};
  costs[at(Stage::attend)] = {.fixed_us = attend_fixed_us, .share = 0.6};
  costs[at(Stage::merge)] = {.fixed_us = 6.0};
  return costs;
}

/// A forward of the default policy, 2% of whose tokens are near beside a window; `inside`: `split` attends them.
CaseTimes forward(const StageCosts& costs, double tokens, double window, bool inside) {
  CaseTimes times;
  times.stage_bytes[at(Stage::score)] = 68.0 * kModel.kv_heads * tokens;
  times.stage_bytes[at(Stage::choose)] = 4.0 * kModel.q_heads * tokens;
  times.stage_bytes[at(Stage::attend)] = 512.0 * kModel.kv_heads * (window + 0.02 * tokens);
  for (const Stage stage : {Stage::append, Stage::score, Stage::choose, Stage::split, Stage::attend, Stage::merge}) {
    times.ran[at(stage)] = true;
    times.stage_us[at(stage)] = takes(costs, stage, times.stage_bytes[at(stage)]);
  }
  // `choose` is nothing where tokens are counted: `split` reads the scores.
  times.stage_us[at(Stage::split)] += times.stage_us[at(Stage::choose)];
  times.stage_us[at(Stage::choose)] = 0.0;
  if (inside) {  // Of `attend` a part of its stamp is left.
    constexpr double kStampUs = 0.2;
    times.stage_us[at(Stage::split)] += times.stage_us[at(Stage::attend)] - kStampUs;
    times.stage_us[at(Stage::attend)] = kStampUs;
  }
  times.layer_us = std::accumulate(times.stage_us.begin(), times.stage_us.end(), 0.0);
  return times;
}

DefaultCases cases_of(const StageCosts& costs, bool inside) {
  DefaultCases cases;
  for (const double tokens : {8192.0, 32768.0, 131072.0}) cases.plain.push_back(forward(costs, tokens, 132.0, inside));
  cases.wide = forward(costs, 32768.0, 8196.0, inside);
  return cases;
}

StageCosts fitted(DefaultCases cases) {
  tell_near_apart(cases, kGbps);
  return default_costs(cases, kGbps);
}

/// The budget that is advised for a policy with much near, by a machine whose CPU is known, too.
std::uint32_t advised(const StageCosts& costs) {
  scheduler::LaneRates rates{.device_gbps = kGbps, .link_gbps = 50.0, .cpu_gbps = 100.0, .stages = costs};
  rates.stage(Stage::attend_far) = scheduler::StageCost{.fixed_us = 6.0, .share = 0.5};
  const PolicySpec policy = parse_policy("exact | int4 | top_k=5% | near=0,sinks=4,recent=8000");
  const scheduler::RowShape shape = scheduler::row_shape(kModel, 16);
  const scheduler::WorkPlace place{.shape = kModel,
                                   .layout = {.page_tokens = 16, .head_dim = kModel.head_dim},
                                   .bucket = scheduler::forward_needs(policy, 131'072, shape).bucket};
  return scheduler::advised_far(rates, place, scheduler::forward_row(policy, 131'072, shape), 1, 0.5).min_tokens;
}

}  // namespace

TEST_CASE("near rows cost what they take, also where no stage of their own attends them", "[plan]") {
  const bool inside = GENERATE(false, true);
  const double launch_us = inside ? 0.0 : 7.0;
  CAPTURE(inside);
  const StageCosts device = kernels(launch_us);
  const DefaultCases cases = cases_of(device, inside);
  const StageCosts costs = fitted(cases);
  for (const Stage stage : {Stage::append, Stage::score, Stage::choose, Stage::split, Stage::attend, Stage::merge}) {
    CAPTURE(to_string(stage));
    REQUIRE(costs[at(stage)]);
    for (const CaseTimes& times : cases.plain) {
      const double bytes = times.stage_bytes[at(stage)];
      REQUIRE(takes(costs, stage, bytes) == Approx(takes(device, stage, bytes)).epsilon(1e-6).margin(1e-6));
    }
  }
  REQUIRE(costs[at(Stage::attend)]->share == Approx(0.6));
  // Layers take what they took, with however much near.
  const CaseTimes other = forward(device, 65536.0, 2048.0, inside);
  double planned_us = 0.0;
  for (std::uint32_t i = 0; i < kStages; ++i) {
    if (costs[i]) planned_us += takes(costs, static_cast<Stage>(i), other.stage_bytes[i]);
  }
  REQUIRE(planned_us == Approx(other.layer_us));
}

TEST_CASE("far tokens are advised in the time of near ones that `split` attends", "[plan][far]") {
  const StageCosts device = kernels(0.0);
  const std::uint32_t all = advised(device);
  REQUIRE(all > kModel.q_heads * scheduler::kLeastAdvised);
  REQUIRE(advised(fitted(cases_of(device, true))) == all);
  // By stamps alone they would cost nothing, and nothing would hide what is far.
  DefaultCases stamped = cases_of(device, true);
  stamped.wide.reset();
  REQUIRE(advised(fitted(stamped)) == kModel.q_heads * scheduler::kLeastAdvised);
}

TEST_CASE("what was disturbed tells no near rows that are faster than the device, or slower than a layer", "[plan]") {
  DefaultCases cases = cases_of(kernels(0.0), true);
  cases.wide->stage_us[at(Stage::split)] = GENERATE(1.0, 60.0, 1e6);
  tell_near_apart(cases, kGbps);
  for (const CaseTimes& times : cases.plain) {
    const double near_us = times.stage_us[at(Stage::attend)], split_us = times.stage_us[at(Stage::split)];
    const double least_us = times.stage_bytes[at(Stage::attend)] / (kGbps * scheduler::kBytesPerUs);
    REQUIRE(split_us >= 0.0);
    REQUIRE((near_us >= Approx(least_us) || split_us == 0.0));
  }
}

TEST_CASE("a machine of which little was measured keeps what it had", "[plan]") {
  DefaultCases none;
  tell_near_apart(none, kGbps);
  for (const auto& cost : default_costs(none, kGbps)) REQUIRE_FALSE(cost);
}
