#include "tools/cli/plan/default_costs.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "scheduler/plan/fitted_cost.hpp"

namespace sluice::tools {
namespace {

using scheduler::CostSample;

constexpr std::size_t at(Stage stage) noexcept { return static_cast<std::size_t>(stage); }

double us_of(const CaseTimes& times, Stage stage) noexcept {
  return times.ran[at(stage)] ? times.stage_us[at(stage)] : 0.0;
}

/// The plain case of the wide one's length.
const CaseTimes& nearest(const DefaultCases& cases) noexcept {
  const auto apart = [&](const CaseTimes& times) {
    return std::abs(times.stage_bytes[at(Stage::score)] - cases.wide->stage_bytes[at(Stage::score)]);
  };
  return *std::ranges::min_element(cases.plain, {}, apart);
}

}  // namespace

double split_to_attend_us(const CaseTimes& times) noexcept {
  return us_of(times, Stage::choose) + us_of(times, Stage::split) + us_of(times, Stage::attend);
}

void set_attend_us(CaseTimes& times, double near_us) noexcept {
  const double all = split_to_attend_us(times);
  const double attend = std::min(all, std::max(us_of(times, Stage::attend), near_us));
  times.ran[at(Stage::attend)] = true;
  times.stage_us[at(Stage::attend)] = attend;
  times.stage_us[at(Stage::choose)] = 0.0;
  times.stage_us[at(Stage::split)] = all - attend;
}

void tell_near_apart(DefaultCases& cases, double device_gbps) {
  if (!cases.wide || cases.plain.empty()) return;
  const auto near_bytes = [](const CaseTimes& times) { return times.stage_bytes[at(Stage::attend)]; };
  const CaseTimes& plain = nearest(cases);
  const std::array samples{CostSample{.us = split_to_attend_us(plain), .bytes = near_bytes(plain)},
                           CostSample{.us = split_to_attend_us(*cases.wide), .bytes = near_bytes(*cases.wide)}};
  const auto grown = scheduler::fitted_cost(samples, device_gbps);
  if (!grown) return;
  // No faster than the device reads, whatever a machine did that had other work between the two.
  const double gbps = std::min(1.0, grown->share) * device_gbps;
  const auto near_us = [&](const CaseTimes& times) { return near_bytes(times) / (gbps * scheduler::kBytesPerUs); };
  for (CaseTimes& times : cases.plain) set_attend_us(times, near_us(times));
  set_attend_us(*cases.wide, near_us(*cases.wide));
}

scheduler::StageCosts default_costs(const DefaultCases& cases, double device_gbps) {
  std::array<std::vector<CostSample>, kStages> samples;
  const auto add = [&](const CaseTimes& times, Stage stage) {
    if (times.ran[at(stage)])
      samples[at(stage)].push_back({.us = times.stage_us[at(stage)], .bytes = times.stage_bytes[at(stage)]});
  };
  for (const CaseTimes& times : cases.plain) {
    for (const Stage stage : {Stage::append, Stage::score, Stage::attend, Stage::merge}) add(times, stage);
    // `split` reads the scores, which the bytes of `choose` stand for.
    if (times.ran[at(Stage::split)])
      samples[at(Stage::split)].push_back({.us = us_of(times, Stage::split) + us_of(times, Stage::choose),
                                           .bytes = times.stage_bytes[at(Stage::choose)]});
  }
  if (cases.wide) add(*cases.wide, Stage::attend);
  scheduler::StageCosts costs{};
  for (const Stage stage : {Stage::append, Stage::score, Stage::attend, Stage::merge})
    costs[at(stage)] = scheduler::fitted_cost(samples[at(stage)], device_gbps);
  if (const auto cost = scheduler::fitted_cost(samples[at(Stage::split)], device_gbps)) {
    costs[at(Stage::split)] = {.fixed_us = cost->fixed_us};
    costs[at(Stage::choose)] = {.share = cost->share};
  }
  return costs;
}

}  // namespace sluice::tools
