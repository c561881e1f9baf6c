#include "tools/cli/plan/policy_costs.hpp"

#include <algorithm>
#include <optional>
#include <vector>

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

/// Of an answer, from the device's question until it has noticed it.
double away_us(const CaseTimes& times, const LaneRates& rates) noexcept { return times.answer_us + rates.hand_over_us; }

/// Where the device waits for most of the time, what its own stages take is a difference of large numbers.
bool tells_device(const CaseTimes& times) noexcept {
  constexpr double kMostWaited = 0.25;
  return times.waited_us <= kMostWaited * times.layer_us;
}

/// What the device does between its question and its wait: as much of the CPU's answer as it did not wait for. Nothing
/// where it never waited.
std::optional<double> beside_answer_us(std::span<const CaseTimes> cases, const LaneRates& rates) {
  constexpr double kWaited = 1.0;
  std::vector<double> beside;
  for (const CaseTimes& times : cases) {
    if (times.far_bytes > 0.0 && times.waited_us > kWaited)
      beside.push_back(std::max(0.0, away_us(times, rates) - times.waited_us));
  }
  if (beside.empty()) return std::nullopt;
  std::ranges::sort(beside);
  return beside[beside.size() / 2];
}

/// Where something is chosen, near rows take what they take for the default. Of a policy that chooses nothing, `attend`
/// is what goes on beside the CPU: what comes before its question is `split`, though it attends as well. Where the CPU
/// was never waited for, nobody can tell, and all is `attend`.
void tell_near_apart(CaseTimes& times, const LaneRates& rates, const std::optional<double>& beside_us) {
  const bool chooses = times.ran[at(Stage::score)] || times.ran[at(Stage::rank)];
  const double all = split_to_attend_us(times);
  set_attend_us(times, chooses ? cost_us(Stage::attend, times, rates) : beside_us.value_or(all));
}

StageCosts device_costs(std::span<const CaseTimes> cases, const LaneRates& rates) {
  DefaultCases told;
  std::vector<CostSample> ranked;
  const std::optional<double> beside_us = beside_answer_us(cases, rates);
  for (CaseTimes times : cases) {
    if (!tells_device(times)) continue;
    tell_near_apart(times, rates, beside_us);
    told.plain.push_back(times);
    if (times.ran[at(Stage::rank)])
      ranked.push_back({.us = times.stage_us[at(Stage::rank)], .bytes = times.stage_bytes[at(Stage::rank)]});
  }
  StageCosts costs = default_costs(told, rates.device_gbps);
  costs[at(Stage::rank)] = scheduler::fitted_cost(ranked, rates.device_gbps);
  return costs;
}

/// Of a stage of the CPU: what its answers took beyond the other one. `rates` have what that takes.
std::optional<StageCost> answer_cost(Stage stage, std::span<const CaseTimes> cases, const LaneRates& rates) {
  const Stage other = stage == Stage::choose_far ? Stage::attend_far : Stage::choose_far;
  constexpr double kLeastUs = 0.1;
  std::vector<CostSample> samples;
  for (const CaseTimes& times : cases) {
    if (!has(times, stage)) continue;
    // Nothing is attended where that is fetched.
    const double us = away_us(times, rates) - cost_us(other, times, rates);
    samples.push_back({.us = std::max(us, kLeastUs), .bytes = bytes_of(times, stage)});
  }
  return scheduler::fitted_cost(samples, rates.cpu_gbps);
}

/// Whether attending alone would take as long as each whole answer did: then `rates` have it of other lists, short ones
/// whose rows lie apart, and it says nothing of these.
bool too_slow(std::span<const CaseTimes> cases, const LaneRates& rates) {
  return !cases.empty() && std::ranges::all_of(cases, [&](const CaseTimes& times) {
    return has(times, Stage::attend_far) && cost_us(Stage::attend_far, times, rates) >= away_us(times, rates);
  });
}

/// Of policies that the CPU chooses for and that were not timed apart from what it attends.
void tell_answers(std::span<const CaseTimes> cases, const LaneRates& rates, StageCosts& costs) {
  if (!too_slow(cases, rates)) {
    costs[at(Stage::choose_far)] = answer_cost(Stage::choose_far, cases, rates);
    return;
  }
  LaneRates none = rates;
  costs[at(Stage::choose_far)] = none.stage(Stage::choose_far) = {.fixed_us = 0.0, .share = scheduler::kMostCostShare};
  costs[at(Stage::attend_far)] = answer_cost(Stage::attend_far, cases, none);
}

}  // namespace

bool alike(const PolicySpec& a, const PolicySpec& b) noexcept {
  return a.sources == b.sources && a.estimate == b.estimate && a.budget.kind == b.budget.kind &&
         scheduler::chooser(a) == scheduler::chooser(b);
}

const PolicyCosts* like(const PolicySpec& policy, std::span<const PolicyCosts> costs) {
  const auto found =
      std::ranges::find_if(costs, [&](const PolicyCosts& each) { return alike(policy, parse_policy(each.policy)); });
  if (found != costs.end()) return &*found;
  // Of those that are measured it comes nearest: all copies are read, and a share of what they say is chosen.
  constexpr const char* kNearest = "exact | int4 | top_p=0.95";
  const bool takes_pages = policy.budget.kind == BudgetKind::progressive && policy.estimate == Estimate::int4;
  return takes_pages ? like(parse_policy(kNearest), costs) : nullptr;
}

LaneRates rates_for(const PolicySpec& policy, std::span<const PolicyCosts> costs, const LaneRates& rates) {
  LaneRates result = rates;
  const PolicyCosts* const found = like(policy, costs);
  if (found == nullptr) return result;
  for (std::uint32_t i = 0; i < kStages; ++i) {
    if (!found->stages[i] && !found->batch[i]) continue;
    if (found->stages[i]) result.stages[i] = found->stages[i];
    result.batch[i] = found->batch[i];
  }
  // What `choose`, `split` and `attend` take is told of all three together: one with an `attend` of its own and no
  // `split` has that in it, and what the default's takes would be counted twice.
  if (found->stages[at(Stage::attend)] && !found->stages[at(Stage::split)]) {
    result.stages[at(Stage::split)] = StageCost{};
    result.batch[at(Stage::split)] = std::nullopt;
  }
  return result;
}

std::optional<StageCost> fetch_cost(std::span<const CaseTimes> streamed, const LaneRates& rates) {
  constexpr double kLeastUs = 0.1;
  std::vector<CostSample> samples;
  for (const CaseTimes& times : streamed) {
    if (!has(times, Stage::fetch)) continue;
    double rest = times.layer_us - times.apart_us - times.waited_us;
    for (const Stage which :
         {Stage::append, Stage::rank, Stage::score, Stage::choose, Stage::split, Stage::attend, Stage::merge})
      rest -= cost_us(which, times, rates);
    samples.push_back({.us = std::max(rest, kLeastUs), .bytes = bytes_of(times, Stage::fetch)});
  }
  return scheduler::fitted_cost(samples, rates.link_gbps);
}

PolicyCosts policy_costs(const PolicyCases& cases, const LaneRates& rates) {
  PolicyCosts costs{.policy = cases.policy};
  if (scheduler::chooser(parse_policy(cases.policy)) == scheduler::Chooser::device) {
    costs.stages = device_costs(cases.alone, rates);
    costs.stages[at(Stage::attend_far)] = answer_cost(Stage::attend_far, cases.alone, rates);
    costs.batch = device_costs(cases.together, rates);
    return costs;
  }
  LaneRates told = rates;
  const auto set = [&](Stage stage, std::span<const CaseTimes> of) {
    costs.stages[at(stage)] = told.stages[at(stage)] = answer_cost(stage, of, told);
  };
  if (cases.streamed.empty()) {
    tell_answers(cases.alone, rates, costs.stages);
    for (const Stage stage : {Stage::choose_far, Stage::attend_far}) {
      if (costs.stages[at(stage)]) told.stages[at(stage)] = costs.stages[at(stage)];
    }
  } else {
    set(Stage::choose_far, cases.streamed);
    set(Stage::attend_far, cases.alone);
  }
  if (!cases.alone.empty()) costs.scored = cases.alone.back().scored_share;
  costs.batch[at(Stage::choose_far)] = answer_cost(Stage::choose_far, cases.together, told);
  return costs;
}

}  // namespace sluice::tools
