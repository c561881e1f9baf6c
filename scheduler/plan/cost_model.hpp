#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/trace.hpp"

namespace sluice::scheduler {

inline constexpr double kBytesPerUs = 1e3;  ///< of 1 GB/s

/// What the kernel of a stage takes beyond its bytes, and the share of its lane's rate with which it moves these.
struct StageCost {
  double fixed_us = 0.0;
  double share = 1.0;
  friend constexpr bool operator==(const StageCost&, const StageCost&) = default;
};

/// By stage; what has none is not known.
using StageCosts = std::array<std::optional<StageCost>, kStages>;

/// How fast the lanes of a machine are. 1 GB = 1e9 bytes.
struct LaneRates {
  double device_gbps = 0.0;  ///< attention over rows in device memory
  double link_gbps = 0.0;
  double cpu_gbps = 0.0;  ///< all threads together
  // Measured in one CUDA graph of 32 layers on an H200 with PCIe 5: 5.8 us per layer of three kernels, and 8.3 where
  // one of them waits for the CPU's answer.
  double launch_us = 1.9;    ///< of what the device does, beyond its bytes
  double hand_over_us = 2.5; ///< from the device's question to the CPU's work, and back
  double forward_us = 0.0;   ///< of a forward beside its layers: planning it, and learning that it has ended
  /// Of the lane that a stage spends its time on; where there is none, bytes take what the lane's rate says, and
  /// launch_us or hand_over_us come on top.
  StageCosts stages{};
  /// The same of forwards of so many sequences or more; 0: none was measured, and `stages` hold for them. A kernel
  /// gives each list of a KV head the thread blocks that fill the device, a few for one sequence's; so what does not
  /// grow with the bytes grows with the sequences until it is full, and no further, and bytes move faster than for one.
  std::uint32_t batch_rows = 0;
  StageCosts batch{};

  [[nodiscard]] constexpr std::optional<StageCost>& stage(Stage which) noexcept {
    return stages[static_cast<std::size_t>(which)];
  }
  [[nodiscard]] constexpr std::optional<StageCost>& batch_stage(Stage which) noexcept {
    return batch[static_cast<std::size_t>(which)];
  }
};

/// Of a machine whose device and whose memory, read by the CPU, were measured. What the device does not know is taken
/// to be as the host's memory; one that knows its own memory is a GPU, whose kernels take what they took on one H100.
[[nodiscard]] LaneRates lane_rates(const DeviceRates& device, double cpu_gbps) noexcept;

/// When an item runs, in microseconds from the forward's begin.
struct PlannedTime {
  double begin_us = 0.0;
  double end_us = 0.0;
};

/// The items in their order, each as soon as those before it have ended and its lane is free.
[[nodiscard]] std::vector<PlannedTime> estimate(std::span<const WorkItem> items, const LaneRates& rates);

}  // namespace sluice::scheduler
