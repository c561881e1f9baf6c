#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/far/far_notes.hpp"
#include "scheduler/plan/task_graph.hpp"
#include "sluice/engine.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/trace.hpp"

namespace sluice::runtime {

[[nodiscard]] inline std::int64_t ns_of(Clock::time_point time) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// A look at a prompt that a plan has waited for, or found done.
struct LookNote {
  std::uint64_t sequence = 0;
  Clock::time_point begin{}, end{};
  Clock::time_point waited_from{}, waited_until{};  ///< by the plan
};

/// What is kept of a forward that is traced, from its plan until it is finished.
struct TraceNotes {
  std::uint64_t forward = 0;
  Clock::time_point planned{};
  Clock::time_point ended{};           ///< when that was seen; later than the device's last stamp
  /// When the device had nothing of other forwards left to do, if that is known.
  std::optional<Clock::time_point> idle{};
  Clock::time_point awaited_from{}, awaited_until{};  ///< the forward's end, by the calling thread
  EngineStats before{};                ///< what the engine had counted when it was planned
  EngineStats after{};                 ///< and when it had ended
  std::vector<ForwardRow> rows{};      ///< that choose, as they were planned
  bool awaits_lists = true;  ///< that `fetch` waits for one list after the other, and not for all of the answer
  bool fetches_chosen = false;         ///< `fetch` waits, too: for what the CPU chooses, of one list after the other
  std::vector<ForwardStamp> stamps{};  ///< [layers, kStampedStages]
  FarWork far{};
  std::vector<LookNote> looks{};
};

/// How far the host's clock is ahead of the device's, in nanoseconds, and how exact that is.
struct ClockOffset {
  std::int64_t ahead_ns = 0;
  std::int64_t error_ns = 0;
};
/// From what must have come one after the other: the plan, the first stamp, the last, and the host's look at the end;
/// and of each question the stamp before it, when it was seen, when it was answered, and the stamp behind its merge.
/// The offset lies between the bounds that the closest of these give; rates of clocks count as equal.
[[nodiscard]] ClockOffset align(const TraceNotes& notes) noexcept;

/// The trace of a forward of these tasks: of stages, those of which begin and end were stamped.
[[nodiscard]] ForwardTrace trace_of(const TraceNotes& notes, const ClockOffset& offset,
                                    const scheduler::TaskGraph& graph, std::vector<WorkItem> work, bool done);

/// When the device had come to the end of a forward, by its trace.
[[nodiscard]] Clock::time_point end_of(const ForwardTrace& trace) noexcept;

}  // namespace sluice::runtime
