#pragma once

#include <cstdint>
#include <string_view>

#include "sluice/error.hpp"

namespace sluice {

/// How a device waits, in a layer, for what the CPU attends or chooses. Tokens are the same with each.
enum class Handover : std::uint8_t {
  automatic,  ///< as suits the device, see DeviceInfo::handover
  device,     ///< one thread block of a kernel looks for the answer: the fastest. Captured in graphs.
  /// The stream waits by a memory operation, and no kernel runs meanwhile; should the answer not come in time, a thread
  /// of the engine lets the stream go on. Captured in graphs where the driver does that.
  stream,
  /// Nothing on the device waits: the calling thread does, in Engine::attend, between what asks and what needs the
  /// answer. It cannot be captured. What goes where a GPU is shared, by MPS or in turns.
  host,
};

[[nodiscard]] constexpr bool is_valid(Handover handover) noexcept { return handover <= Handover::host; }

[[nodiscard]] constexpr const char* to_string(Handover handover) noexcept {
  switch (handover) {
    case Handover::automatic: return "auto";
    case Handover::device: return "device";
    case Handover::stream: return "stream";
    case Handover::host: return "host";
  }
  return "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists them.
[[nodiscard]] Handover parse_handover(std::string_view text);

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
