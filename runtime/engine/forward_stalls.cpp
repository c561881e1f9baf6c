// Who waited for whom in a forward that was traced.
#include "runtime/engine/forward_stalls.hpp"

#include <algorithm>
#include <utility>

#include "sluice/units.hpp"

namespace sluice::runtime {
namespace {

class StallList {
 public:
  explicit StallList(const TraceNotes& notes)
      : notes_(notes),
        planned_ns_(ns_of(notes.planned)),
        idle_ns_(notes.idle ? std::max(planned_ns_, ns_of(*notes.idle)) : INT64_MAX) {}

  [[nodiscard]] std::vector<TraceStall> take(std::span<const std::vector<StageRun>> layers) {
    std::int64_t before = idle_ns_;
    for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
      if (layers[layer].empty()) continue;
      add(Actor::device, StallCause::enqueuing, layer, before, layers[layer].front().begin_ns);
      for (const StageRun& run : layers[layer]) add_device(layer, run);
      before = layers[layer].back().end_ns;
    }
    add_workers(layers, before);
    for (const LookNote& look : notes_.looks)
      add(Actor::host, StallCause::looking, kNone, ns_of(look.waited_from), ns_of(look.waited_until));
    add(Actor::host, StallCause::computing, kNone, ns_of(notes_.awaited_from), ns_of(notes_.awaited_until));
    return std::move(stalls_);
  }

 private:
  void add(Actor actor, StallCause cause, std::uint32_t layer, std::int64_t begin_ns, std::int64_t end_ns) {
    if (end_ns <= begin_ns) return;
    const auto us = [&](std::int64_t ns) { return 1e-3 * static_cast<double>(ns - planned_ns_); };
    stalls_.push_back({.actor = actor, .cause = cause, .layer = layer, .begin_us = us(begin_ns), .end_us = us(end_ns)});
  }

  /// Null if the layer asked nothing, or was not answered.
  [[nodiscard]] const FarAnswer* answer_of(std::uint32_t layer) const noexcept {
    if (layer >= notes_.far.answers.size() || notes_.far.answers[layer].answered_ns == 0) return nullptr;
    return &notes_.far.answers[layer];
  }
  /// When the last policy of the layer had chosen.
  [[nodiscard]] std::int64_t chosen(std::uint32_t layer, const FarAnswer& answer) const noexcept {
    std::int64_t last = answer.seen_ns;
    for (const FarPiece& piece : notes_.far.pieces) {
      if (piece.layer == layer && piece.stage == Stage::choose_far) last = std::max(last, piece.end_ns);
    }
    return last;
  }

  /// A stage: what the CPU chooses is waited for by `fetch` where that attends it, the answer by `merge`, and the link
  /// by those whose lane it is.
  void add_device(std::uint32_t layer, const StageRun& run) {
    const FarAnswer* const answer = answer_of(layer);
    std::int64_t at = run.begin_ns;
    if (answer != nullptr && run.stage == Stage::merge)
      at = add_answer(layer, run, *answer, answer->answered_ns);
    else if (answer != nullptr && run.stage == Stage::fetch && notes_.fetches_chosen)
      at = add_answer(layer, run, *answer, notes_.awaits_lists ? chosen(layer, *answer) : answer->answered_ns);
    if (lane_of(run.stage) == Lane::link) add(Actor::device, StallCause::arriving, layer, at, run.end_ns);
  }

  /// The time in which a stage waits for workers, not beyond `until`, cut by what they do. Returns its end.
  std::int64_t add_answer(std::uint32_t layer, const StageRun& run, const FarAnswer& answer, std::int64_t until) {
    const std::int64_t end = std::min(until, run.end_ns);
    std::int64_t at = run.begin_ns;
    for (const auto& [cause, cause_end] :
         {std::pair(StallCause::unseen, answer.seen_ns), std::pair(StallCause::choosing, chosen(layer, answer)),
          std::pair(StallCause::attending, end)}) {
      const std::int64_t next = std::min(cause_end, end);
      add(Actor::device, cause, layer, at, next);
      at = std::max(at, next);
    }
    return at;
  }

  /// Of a forward that asks at all.
  void add_workers(std::span<const std::vector<StageRun>> layers, std::int64_t end_ns) {
    std::int64_t at = idle_ns_;
    bool asked = false;
    for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
      const FarAnswer* const answer = answer_of(layer);
      if (answer == nullptr) continue;
      add(Actor::workers, StallCause::computing, layer, at, answer->seen_ns);
      at = answer->answered_ns;
      asked = true;
    }
    if (asked) add(Actor::workers, StallCause::computing, kNone, at, end_ns);
  }

  const TraceNotes& notes_;
  const std::int64_t planned_ns_;
  const std::int64_t idle_ns_;  ///< from when the device waited for this forward; never, if that is not known
  std::vector<TraceStall> stalls_;
};

}  // namespace

std::vector<TraceStall> stalls_of(const TraceNotes& notes, std::span<const std::vector<StageRun>> layers) {
  return StallList(notes).take(layers);
}

}  // namespace sluice::runtime
