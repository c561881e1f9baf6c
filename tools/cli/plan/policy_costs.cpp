#include "tools/cli/plan/policy_costs.hpp"

#include <algorithm>
#include <optional>

#include "scheduler/plan/fitted_cost.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "tools/cli/plan/default_costs.hpp"

namespace sluice::tools {
namespace {

using scheduler::CostSample;
using scheduler::LaneRates;
using scheduler::StageCost;
using scheduler::StageCosts;

constexpr std::size_t at(Stage stage) noexcept { return static_cast<std::size_t>(stage); }

double lane_gbps(Stage stage, const LaneRates& rates) noexcept {
  const Lane lane = lane_of(stage);
  return lane == Lane::cpu ? rates.cpu_gbps : lane == Lane::link ? rates.link_gbps : rates.device_gbps;
}

bool has(const CaseTimes& times, Stage stage) noexcept {
  if (stage == Stage::choose_far) return times.scored_bytes > 0.0;
  if (stage == Stage::attend_far) return times.far_bytes > 0.0;
  return times.ran[at(stage)];
}

double bytes_of(const CaseTimes& times, Stage stage) noexcept {
  if (stage == Stage::choose_far) return times.scored_bytes;
  return stage == Stage::attend_far ? times.far_bytes : times.stage_bytes[at(stage)];
}

/// What the stage takes in such a forward; nothing where the rates do not say.
double cost_us(Stage stage, const CaseTimes& times, const LaneRates& rates) {
  if (!has(times, stage) || !rates.stages[at(stage)]) return 0.0;
  const WorkItem item{.stage = stage,
                      .lane = lane_of(stage),
                      .rows = times.rows,
                      .read = static_cast<std::uint64_t>(bytes_of(times, stage))};
  return scheduler::estimate({&item, 1}, rates).front().end_us;
}

/// Where the device waits for most of the time, what its own stages take is a difference of large numbers.
bool tells_device(const CaseTimes& times) noexcept {
  constexpr double kMostWaited = 0.25;
  return times.waited_us <= kMostWaited * times.layer_us;
}

/// Of a policy that chooses nothing all is `attend`; of others near rows take what they take for the default.
void tell_near_apart(CaseTimes& times, const LaneRates& rates) {
  const bool chooses = times.ran[at(Stage::score)] || times.ran[at(Stage::rank)];
  const double all = split_to_attend_us(times);
  set_attend_us(times, chooses ? cost_us(Stage::attend, times, rates) : all);
}

StageCosts device_costs(std::span<const CaseTimes> cases, const LaneRates& rates) {
  DefaultCases told;
  std::vector<CostSample> ranked, answered;
  for (CaseTimes times : cases) {
    if (times.far_bytes > 0.0)
      answered.push_back({.us = times.answer_us + rates.hand_over_us, .bytes = times.far_bytes});
    if (!tells_device(times)) continue;
    tell_near_apart(times, rates);
    told.plain.push_back(times);
    if (times.ran[at(Stage::rank)])
      ranked.push_back({.us = times.stage_us[at(Stage::rank)], .bytes = times.stage_bytes[at(Stage::rank)]});
  }
  StageCosts costs = default_costs(told, rates.device_gbps);
  costs[at(Stage::rank)] = scheduler::fitted_cost(ranked, rates.device_gbps);
  costs[at(Stage::attend_far)] = scheduler::fitted_cost(answered, rates.cpu_gbps);
  return costs;
}

}  // namespace

bool alike(const PolicySpec& a, const PolicySpec& b) noexcept {
  return a.sources == b.sources && a.estimate == b.estimate && a.budget.kind == b.budget.kind &&
         scheduler::chooser(a) == scheduler::chooser(b);
}

LaneRates rates_for(const PolicySpec& policy, std::span<const PolicyCosts> costs, const LaneRates& rates) {
  LaneRates result = rates;
  for (const PolicyCosts& each : costs) {
    if (!alike(policy, parse_policy(each.policy))) continue;
    for (std::uint32_t i = 0; i < kStages; ++i) {
      if (!each.stages[i] && !each.batch[i]) continue;
      if (each.stages[i]) result.stages[i] = each.stages[i];
      result.batch[i] = each.batch[i];
    }
    break;
  }
  return result;
}

std::optional<StageCost> rest_cost(Stage stage, std::span<const CaseTimes> cases, const LaneRates& rates) {
  std::vector<CostSample> samples;
  for (const CaseTimes& times : cases) {
    if (!has(times, stage)) continue;
    double rest = times.layer_us - times.apart_us;
    for (const Stage which :
         {Stage::append, Stage::rank, Stage::score, Stage::choose, Stage::split, Stage::fetch, Stage::merge})
      rest -= which == stage ? 0.0 : cost_us(which, times, rates);
    const double near_us = cost_us(Stage::attend, times, rates), far_us = cost_us(Stage::attend_far, times, rates);
    rest -= stage == Stage::choose_far ? far_us : std::max(near_us, far_us);
    constexpr double kLeastUs = 0.1;
    samples.push_back({.us = std::max(rest, kLeastUs), .bytes = bytes_of(times, stage)});
  }
  return scheduler::fitted_cost(samples, lane_gbps(stage, rates));
}

StageCosts policy_costs(const PolicySpec& policy, std::span<const CaseTimes> cases, const LaneRates& rates) {
  if (scheduler::chooser(policy) == scheduler::Chooser::device) return device_costs(cases, rates);
  StageCosts costs{};
  costs[at(Stage::choose_far)] = rest_cost(Stage::choose_far, cases, rates);
  return costs;
}

}  // namespace sluice::tools
