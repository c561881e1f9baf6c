#include "scheduler/plan/cost_model.hpp"

#include <algorithm>
#include <array>

namespace sluice::scheduler {
namespace {

double duration_us(const WorkItem& item, std::span<const WorkItem> items, const LaneRates& rates) noexcept {
  constexpr double kBytesPerUs = 1e3;  // Of 1 GB/s.
  const auto bytes = static_cast<double>(item.bytes());
  if (item.lane == Lane::device) return rates.launch_us + bytes / (rates.device_gbps * kBytesPerUs);
  if (item.lane == Lane::link) return rates.launch_us + bytes / (rates.link_gbps * kBytesPerUs);
  const bool handed_over =
      std::ranges::any_of(item.after, [&](std::uint32_t before) { return items[before].lane != Lane::cpu; });
  return (handed_over ? rates.hand_over_us : 0.0) + bytes / (rates.cpu_gbps * kBytesPerUs);
}

}  // namespace

LaneRates lane_rates(const DeviceRates& device, double cpu_gbps) noexcept {
  return {.device_gbps = device.near_gbps > 0.0 ? device.near_gbps : cpu_gbps,
          .link_gbps = device.link_gbps > 0.0 ? device.link_gbps : cpu_gbps,
          .cpu_gbps = cpu_gbps};
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
