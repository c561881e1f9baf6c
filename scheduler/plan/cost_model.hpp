#pragma once

#include <span>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/trace.hpp"

namespace sluice::scheduler {

/// How fast the lanes of a machine are. 1 GB = 1e9 bytes.
struct LaneRates {
  double device_gbps = 0.0;  ///< attention over rows in device memory
  double link_gbps = 0.0;
  double cpu_gbps = 0.0;  ///< all threads together
  // Measured in one CUDA graph of 32 layers on an H200 with PCIe 5: 5.8 us per layer of three kernels, and 8.3 where
  // one of them waits for the CPU's answer.
  double launch_us = 1.9;    ///< of what the device does, beyond its bytes
  double hand_over_us = 2.5; ///< from the device's question to the CPU's work, and back
};

/// Of a machine whose device and whose memory, read by the CPU, were measured. What the device does not know is taken
/// to be as the host's memory.
[[nodiscard]] LaneRates lane_rates(const DeviceRates& device, double cpu_gbps) noexcept;

/// When an item runs, in microseconds from the forward's begin.
struct PlannedTime {
  double begin_us = 0.0;
  double end_us = 0.0;
};

/// The items in their order, each as soon as those before it have ended and its lane is free.
[[nodiscard]] std::vector<PlannedTime> estimate(std::span<const WorkItem> items, const LaneRates& rates);

}  // namespace sluice::scheduler
