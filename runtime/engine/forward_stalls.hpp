#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/engine/forward_trace.hpp"
#include "sluice/trace.hpp"

namespace sluice::runtime {

/// A stage of a layer that the device went through, in nanoseconds by the host's clock.
struct StageRun {
  Stage stage{};
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// Who waited for whom in a forward: of the device by layer and time, then of workers, then of the host.
/// @param layers  what ran, by layer; of those that did not begin nothing
[[nodiscard]] std::vector<TraceStall> stalls_of(const TraceNotes& notes, std::span<const std::vector<StageRun>> layers);

}  // namespace sluice::runtime
