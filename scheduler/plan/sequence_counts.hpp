#pragma once

#include <algorithm>
#include <cstdint>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/engine_options.hpp"

/// How many sequences of an engine have room of their own, which costs memory: as many as its options allow if one of
/// its policies wants that, and else none.
namespace sluice::scheduler {

/// Of policies that choose on the CPU.
[[nodiscard]] inline std::uint32_t cpu_sequences(const EngineOptions& options) noexcept {
  const auto on_cpu = [](const PolicySpec& policy) { return chooser(policy) == Chooser::cpu; };
  return std::ranges::any_of(options.policies, on_cpu) ? std::min(options.cpu_sequences, options.sequences) : 0;
}

/// Of policies that choose among clusters on the device.
[[nodiscard]] inline std::uint32_t cluster_sequences(const EngineOptions& options) noexcept {
  const bool any = std::ranges::any_of(options.policies, clusters_on_device);
  return any ? std::min(options.cluster_sequences, options.sequences) : 0;
}

}  // namespace sluice::scheduler
