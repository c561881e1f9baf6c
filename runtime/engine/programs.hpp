#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/background/forward_audit.hpp"
#include "runtime/engine/forward_trace.hpp"
#include "scheduler/prefill_auto.hpp"
#include "sluice/engine.hpp"

namespace sluice::runtime {

/// What choices of blocks for a chunk of a prompt came to in a layer, over all query heads.
struct ChunkTally {
  std::uint64_t kept = 0;
  std::uint64_t causal = 0;
};

/// What PrefillMode::automatic goes by in a sequence.
struct PrefillBook {
  scheduler::PrefillBets balance{};
  std::vector<std::uint32_t> rests{};  ///< [layers]
  std::uint32_t end = 0;               ///< position behind the newest chunk that was decided about
};

/// A forward that is planned and not finished: what the sequences it refers to get from it.
struct Program {
  std::uint64_t forward = 0;
  std::uint32_t slip = 0;  ///< that it is planned by
  Bucket bucket{};
  void* stream = nullptr;
  std::vector<PlanItem> items;
  std::vector<std::uint32_t> ends;       ///< [items] position behind the item's newest token
  std::optional<ForwardStatus> ended{};  ///< how, if that was seen before it is asked about
  std::shared_ptr<ForwardAudit> audit{};  ///< null: it is not audited
  std::unique_ptr<TraceNotes> trace{};    ///< null: it is not traced
  std::vector<ForwardChunk> chunks{};     ///< as they were planned
  std::uint64_t estimated = 0;            ///< as in EngineStats
  std::uint64_t ranked_pages = 0;
  std::vector<ChunkTally> tallies{};      ///< [chunks, layers] once it is known to have got to its end
  std::vector<PrefillBook> books{};       ///< [items] before it was planned; empty unless that is automatic
};

/// Programs in flight, in the order of their forwards.
class Programs {
 public:
  explicit Programs(std::uint32_t most) : most_(most) {}

  [[nodiscard]] bool empty() const noexcept { return programs_.empty(); }
  /// Whether one of them has to end before there is room for another.
  [[nodiscard]] bool full() const noexcept { return !programs_.empty() && !has_free_slip(); }
  /// A slip that none of them is planned by, and that is not lost; there must be one.
  [[nodiscard]] std::uint32_t free_slip() const noexcept {
    std::uint32_t slip = 0;
    while (std::ranges::find(programs_, slip, &Program::slip) != programs_.end() || is_lost(slip)) ++slip;
    return slip;
  }
  [[nodiscard]] bool has_free_slip() const noexcept { return programs_.size() + lost_.size() < most_; }
  /// The device may read it at any time, and nobody can tell when it has: it is used no more.
  void lose(std::uint32_t slip) { lost_.push_back(slip); }
  [[nodiscard]] std::deque<Program>& all() noexcept { return programs_; }
  [[nodiscard]] const std::deque<Program>& all() const noexcept { return programs_; }
  [[nodiscard]] Program& newest() noexcept { return programs_.back(); }
  [[nodiscard]] const Program& newest() const noexcept { return programs_.back(); }
  /// Null if it is not in flight.
  [[nodiscard]] const Program* find(std::uint64_t forward) const noexcept {
    const auto found = std::ranges::find(programs_, forward, &Program::forward);
    return found == programs_.end() ? nullptr : &*found;
  }
  [[nodiscard]] bool has(SequenceId sequence) const noexcept {
    return std::ranges::any_of(programs_, [&](const Program& program) {
      return std::ranges::find(program.items, sequence, &PlanItem::sequence) != program.items.end();
    });
  }
  void push(Program program) { programs_.push_back(std::move(program)); }
  /// It must be in flight.
  [[nodiscard]] Program take(std::uint64_t forward) {
    const auto found = std::ranges::find(programs_, forward, &Program::forward);
    Program program = std::move(*found);
    programs_.erase(found);
    return program;
  }

 private:
  [[nodiscard]] bool is_lost(std::uint32_t slip) const noexcept {
    return std::ranges::find(lost_, slip) != lost_.end();
  }

  std::uint32_t most_;
  std::deque<Program> programs_;
  std::vector<std::uint32_t> lost_;
};

}  // namespace sluice::runtime
