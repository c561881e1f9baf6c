#pragma once

#include <cstdint>

#include "sluice/trace.hpp"

namespace sluice::tools {

/// What a traced forward tells of the pipeline in which the CPU chooses, the link carries and the device attends: in
/// microseconds, means over its layers.
struct PipelineTimes {
  double choice_us = 0.0;   ///< of the CPU, from the first choice of a layer that began to the last that ended
  double waited_us = 0.0;   ///< that the device waited for the CPU, with nothing else to do
  double exposed_us = 0.0;  ///< and for the link
};
[[nodiscard]] PipelineTimes pipeline_times(const ForwardTrace& trace, std::uint32_t layers);

/// What a layer may take that is waited for nowhere but where it must be: 1.15 x (the CPU's choice + what of the link's
/// time is exposed) + 12 us.
struct PipelineGoal {
  /// All that crosses the link, but no more than would have crossed while the device waited for it: a link that is
  /// slower than it can be earns no time.
  double exposed_bytes = 0.0;
  double us = 0.0;
};
/// @param link_bytes   of a layer, over the link
/// @param gather_gbps  at which the link carries scattered pages, 1 GB = 1e9 bytes; above 0
[[nodiscard]] PipelineGoal pipeline_goal(const PipelineTimes& times, double link_bytes, double gather_gbps) noexcept;

}  // namespace sluice::tools
