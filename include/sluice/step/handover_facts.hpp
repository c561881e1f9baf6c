#pragma once

#include "sluice/device.hpp"

namespace sluice {

/// What is known of a device when it is opened.
struct HandoverFacts {
  bool shared = false;          ///< by a server that runs kernels of several processes at once (MPS)
  bool kernel_limit = false;    ///< the driver ends kernels that run for long, as it does on a GPU with a display
  bool stream_waits = false;    ///< its streams wait for a word of pinned memory by themselves
  bool captures_waits = false;  ///< also where they are captured
};

/// What Handover::automatic is on such a device. Kernels that wait may keep those of other processes from running under
/// MPS, where nothing is said about memory operations either; a limit ends kernels, and not a stream that waits.
[[nodiscard]] constexpr Handover advised_handover(const HandoverFacts& facts) noexcept {
  if (facts.shared) return Handover::host;
  if (facts.kernel_limit) return facts.stream_waits ? Handover::stream : Handover::host;
  return Handover::device;
}

/// Why that is not Handover::device; empty if it is.
[[nodiscard]] constexpr const char* handover_reason(const HandoverFacts& facts) noexcept {
  if (facts.shared) return "MPS shares the GPU with other processes";
  return facts.kernel_limit ? "the driver ends kernels that run for long, as beside a display" : "";
}

}  // namespace sluice
