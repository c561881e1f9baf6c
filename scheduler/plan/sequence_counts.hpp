#pragma once

#include <algorithm>
#include <cstdint>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/engine_options.hpp"

/// How many sequences of an engine have room of their own, which costs memory: where no number is given, all of them if
/// one of its policies wants that, and else none.
namespace sluice::scheduler {

/// Of policies that choose on the CPU.
[[nodiscard]] inline std::uint32_t cpu_sequences(const EngineOptions& options) noexcept {
  if (options.cpu_sequences != kAllSequences) return options.cpu_sequences;
  const auto on_cpu = [](const PolicySpec& policy) { return chooser(policy) == Chooser::cpu; };
  return std::ranges::any_of(options.policies, on_cpu) ? options.sequences : 0;
}

/// Of policies that choose among clusters on the device.
[[nodiscard]] inline std::uint32_t cluster_sequences(const EngineOptions& options) noexcept {
  if (options.cluster_sequences != kAllSequences) return options.cluster_sequences;
  return std::ranges::any_of(options.policies, clusters_on_device) ? options.sequences : 0;
}

}  // namespace sluice::scheduler
