#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "sluice/units.hpp"

namespace sluice {

/// What is done in a layer of a forward. Those before `choose_far` are verbs of ForwardVerbs.
enum class Stage : std::uint8_t {
  start,    ///< the layer begins; takes no time
  append,   ///< new keys, values and queries are written
  gather,   ///< keys and values that chunks of prompts attend are brought together, over the link where they lie far
  prefill,  ///< chunks of prompts attend
  rank,     ///< pages are scored by digest, and chosen
  score,    ///< tokens are scored by their copies in codes
  choose,   ///< tokens are chosen by score
  split,    ///< near and far rows are listed, and the CPU is asked
  attend,   ///< near rows are attended
  promote,  ///< far rows that are to come near are listed
  fetch,    ///< far rows are attended by the device, over the link
  merge,    ///< the far part is waited for, and partial results are merged
  audit,
  choose_far,  ///< policies choose on the CPU
  attend_far,  ///< far rows are attended by the CPU, in place
};
inline constexpr std::uint32_t kStages = 15;
/// Of them, those that the device stamps; see ForwardVerbs::stamp.
inline constexpr std::uint32_t kStampedStages = 13;

[[nodiscard]] constexpr const char* to_string(Stage stage) noexcept {
  constexpr const char* kNames[] = {"start", "append", "gather", "prefill",    "rank",
                                    "score", "choose", "split",  "attend",     "promote",
                                    "fetch", "merge",  "audit",  "choose_far", "attend_far"};
  static_assert(std::size(kNames) == kStages);
  return static_cast<std::size_t>(stage) < kStages ? kNames[static_cast<std::size_t>(stage)] : "unknown";
}

/// What work goes through.
enum class Lane : std::uint8_t {
  device,  ///< its processors and memory
  link,    ///< between device and host memory, driven by the device
  cpu,     ///< threads of the host and their memory
};

[[nodiscard]] constexpr const char* to_string(Lane lane) noexcept {
  return lane == Lane::device ? "device" : lane == Lane::link ? "link" : lane == Lane::cpu ? "cpu" : "unknown";
}

/// The lane that a stage spends its time on; what it moves elsewhere is another WorkItem of it.
[[nodiscard]] constexpr Lane lane_of(Stage stage) noexcept {
  if (stage == Stage::choose_far || stage == Stage::attend_far) return Lane::cpu;
  const bool link = stage == Stage::gather || stage == Stage::fetch;
  return link ? Lane::link : Lane::device;
}

/// A part of a forward's work, on one lane: what a plan makes of it. See scheduler/plan/forward_work.hpp.
struct WorkItem {
  Stage stage{};
  Lane lane{};
  std::uint32_t layer = 0;
  std::uint32_t rows = 0;  ///< of the forward that it is done for
  std::uint64_t read = 0;  ///< bytes, on its lane
  std::uint64_t written = 0;
  std::vector<std::uint32_t> after{};  ///< indices of items that must have ended, all of them lower than its own

  [[nodiscard]] std::uint64_t bytes() const noexcept { return read + written; }
  friend bool operator==(const WorkItem&, const WorkItem&) = default;
};

/// When a stage ran, in microseconds from when its forward was planned. Where a prompt is read in windows, `gather` is
/// those of all windows together, as if they came before what `prefill` attends.
struct TraceSpan {
  Stage stage{};
  Lane lane{};
  std::uint32_t layer = 0;
  std::uint32_t thread = 0;  ///< of the CPU; 0 on other lanes
  double begin_us = 0.0;
  double end_us = 0.0;
  std::uint32_t rows = 0;   ///< as planned
  std::uint64_t bytes = 0;  ///< as planned; of the CPU: the layer's, over all threads
};

/// A party that waits, or is waited for.
enum class Actor : std::uint8_t {
  device,
  link,     ///< never waits by itself: the device drives it
  workers,  ///< threads of the host that answer
  host,     ///< the thread that plans, enqueues and finishes forwards
};

[[nodiscard]] constexpr const char* to_string(Actor actor) noexcept {
  constexpr const char* kNames[] = {"device", "link", "workers", "host"};
  return static_cast<std::size_t>(actor) < std::size(kNames) ? kNames[static_cast<std::size_t>(actor)] : "unknown";
}

/// What is waited for.
enum class StallCause : std::uint8_t {
  unseen,     ///< workers: no thread has seen the question yet
  choosing,   ///< workers: policies choose
  attending,  ///< workers: far rows are attended, and the answer is given
  looking,    ///< workers: policies look at a prompt
  arriving,   ///< link: rows are gathered, or attended over it
  computing,  ///< device: it has not asked yet, or the forward has not ended
  enqueuing,  ///< host: the layer was not enqueued yet, or what the caller has enqueued before it ran
};

[[nodiscard]] constexpr const char* to_string(StallCause cause) noexcept {
  constexpr const char* kNames[] = {"unseen", "choosing", "attending", "looking", "arriving", "computing", "enqueuing"};
  return static_cast<std::size_t>(cause) < std::size(kNames) ? kNames[static_cast<std::size_t>(cause)] : "unknown";
}

[[nodiscard]] constexpr Actor waited_for(StallCause cause) noexcept {
  switch (cause) {
    case StallCause::arriving: return Actor::link;
    case StallCause::computing: return Actor::device;
    case StallCause::enqueuing: return Actor::host;
    default: return Actor::workers;
  }
}

/// One of them waits, with nothing else to do.
/// The device waits for workers in a layer's merge, which goes on when the device has noticed the answer, and in its
/// fetch, if the CPU chooses what that attends, with nothing but lists that were chosen before; for the link in what is
/// left of the fetch, and while rows are gathered; for the host before each layer.
/// Workers wait for the device until they see a question, and after the last answer until the forward ends.
/// The host waits for looks at prompts in `plan`, and for the device in `finish`.
struct TraceStall {
  Actor actor = Actor::device;  ///< that waits
  StallCause cause{};
  std::uint32_t layer = 0;  ///< the one that begins, of the host's `enqueuing`; kNone: of no layer
  double begin_us = 0.0;
  double end_us = 0.0;
};

/// A look of a policy at its sequence's prompt, before the forward was planned that decodes the first token behind it.
struct TraceLook {
  std::uint64_t sequence = 0;
  double begin_us = 0.0;
  double end_us = 0.0;
};

/// What ran of a forward that was traced (Bucket::trace).
struct ForwardTrace {
  std::uint64_t forward = 0;
  bool done = false;            ///< it got to its end; else spans are those of stages that were completed
  Clock::time_point planned{};  ///< when times begin
  /// Device against CPU: times of the former are off by at most as many microseconds. 0 where the clock is the same.
  double clock_error_us = 0.0;
  std::vector<TraceSpan> spans{};  ///< those of the device by layer and time, then those of the CPU
  std::vector<TraceStall> stalls{};
  std::vector<TraceLook> looks{};
  std::vector<WorkItem> work{};  ///< as planned, with what was attended near and far as it was counted meanwhile
  std::uint64_t dropped = 0;     ///< spans of the CPU for which there was no room
};

}  // namespace sluice
