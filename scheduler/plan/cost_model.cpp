#include "scheduler/plan/cost_model.hpp"

#include <algorithm>
#include <array>

namespace sluice::scheduler {
namespace {

double rate_of(Lane lane, const LaneRates& rates) noexcept {
  return lane == Lane::device ? rates.device_gbps : lane == Lane::link ? rates.link_gbps : rates.cpu_gbps;
}

/// What the item's stage takes where it was measured, on its own lane.
std::optional<double> measured_us(const WorkItem& item, const LaneRates& rates) noexcept {
  const auto stage = static_cast<std::size_t>(item.stage);
  if (lane_of(item.stage) != item.lane || !rates.stages[stage]) return std::nullopt;
  const auto takes = [&](const StageCost& cost) {
    return cost.fixed_us + static_cast<double>(item.bytes()) / (cost.share * rate_of(item.lane, rates) * kBytesPerUs);
  };
  const double one = takes(*rates.stages[stage]);
  if (rates.batch_rows < 2 || !rates.batch[stage] || item.rows < 2) return one;
  // Thread blocks are added with each sequence.
  const double part = std::min(1.0, (item.rows - 1.0) / (rates.batch_rows - 1.0));
  return one + part * (takes(*rates.batch[stage]) - one);
}

double duration_us(const WorkItem& item, std::span<const WorkItem> items, const LaneRates& rates) noexcept {
  const auto bytes = static_cast<double>(item.bytes());
  if (const auto measured = measured_us(item, rates)) return *measured;
  if (item.lane == Lane::device) return rates.launch_us + bytes / (rates.device_gbps * kBytesPerUs);
  if (item.lane == Lane::link) return rates.launch_us + bytes / (rates.link_gbps * kBytesPerUs);
  const bool handed_over =
      std::ranges::any_of(item.after, [&](std::uint32_t before) { return items[before].lane != Lane::cpu; });
  return (handed_over ? rates.hand_over_us : 0.0) + bytes / (rates.cpu_gbps * kBytesPerUs);
}

/// Stamps of traced forwards (`sluice bench gpu --trace`), less what a stamp takes, on one H100 80 GB with 16 shared
/// cores: one sequence of the Llama-3.1-8B shape at 8K, 32K and 128K tokens. `split` reads what `score` has written,
/// for which the bytes of `choose` stand; that itself is nothing but for top-p. `fetch`: a program that reads rows of
/// 256 bytes of K and of V at random from registered memory gets 19 GB/s of a link that brings pages of 16 KiB with 50.
void set_gpu_costs(LaneRates& rates) noexcept {
  rates.forward_us = 120.0;
  rates.stage(Stage::append) = {.fixed_us = 4.6};
  rates.stage(Stage::score) = {.fixed_us = 4.9, .share = 0.69};
  rates.stage(Stage::choose) = {.fixed_us = 0.0, .share = 0.23};
  rates.stage(Stage::split) = {.fixed_us = 16.6};
  rates.stage(Stage::attend) = {.fixed_us = 7.6, .share = 0.68};
  rates.stage(Stage::fetch) = {.fixed_us = 3.0, .share = 0.4};
  rates.stage(Stage::merge) = {.fixed_us = 9.5};
  rates.stage(Stage::attend_far) = {.fixed_us = 6.0, .share = 0.5};
}

}  // namespace

LaneRates lane_rates(const DeviceRates& device, double cpu_gbps) noexcept {
  LaneRates rates{.device_gbps = device.near_gbps > 0.0 ? device.near_gbps : cpu_gbps,
                  .link_gbps = device.link_gbps > 0.0 ? device.link_gbps : cpu_gbps,
                  .cpu_gbps = cpu_gbps};
  if (device.near_gbps > 0.0) set_gpu_costs(rates);
  return rates;
}

std::vector<PlannedTime> estimate(std::span<const WorkItem> items, const LaneRates& rates) {
  std::vector<PlannedTime> times;
  times.reserve(items.size());
  std::array<double, 3> free_us{};  // [lanes]
  for (const WorkItem& item : items) {
    double& lane_us = free_us[static_cast<std::size_t>(item.lane)];
    double begin = lane_us;
    for (const std::uint32_t before : item.after) begin = std::max(begin, times[before].end_us);
    lane_us = begin + duration_us(item, items, rates);
    times.push_back({.begin_us = begin, .end_us = lane_us});
  }
  return times;
}

}  // namespace sluice::scheduler
