#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/history/lesson.hpp"
#include "scheduler/undo.hpp"

namespace sluice::scheduler {

/// The newest steps of a KV head's history, so that they can be taken back: lessons of the steps that were observed,
/// and what was noted in those between them. It goes back kUndoTokens tokens, or as far as `most_bytes` of lessons
/// reach.
class HistoryJournal {
 public:
  /// A token that a step which was not observed found heavy.
  struct Note {
    std::uint32_t step = 0;
    std::uint32_t token = 0;
  };
  /// At most as many are kept; what comes before those that would be too many cannot be taken back to, and nothing can
  /// until the next lesson if as many come behind the newest one.
  static constexpr std::uint32_t kMostNotes = 2048;

  /// Begins with a history that has seen `tokens` tokens.
  void begin(std::uint32_t tokens);
  /// Nothing before `step`, which was observed last, can be taken back to.
  void restart(std::uint32_t step) noexcept;
  /// Keeps a step. If there is no memory, nothing before it can be taken back to.
  void add(const Lesson& lesson, std::uint64_t most_bytes) noexcept;
  void note(const Note& note) noexcept;

  /// Whether the history can go back to what it was with `tokens` tokens.
  [[nodiscard]] bool reaches(std::uint32_t tokens) const noexcept { return oldest_ <= tokens; }
  /// The newest lesson, of a step behind `tokens`; null if there is none.
  [[nodiscard]] const Lesson* newest(std::uint32_t tokens) const noexcept;
  /// Forgets it, once the tables are as they were before it.
  void drop(const Lesson& lesson) noexcept;
  void drop_notes(std::uint32_t tokens) noexcept;
  /// The newest step that was observed; the tokens that it began with if none was.
  [[nodiscard]] std::uint32_t last() const noexcept;
  /// Of the steps since, ascending.
  [[nodiscard]] std::span<const Note> notes() const noexcept;

  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(lessons_, notes_); }
  /// What a journal holds at most, beside its notes.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint64_t most_bytes) noexcept {
    return kUndoTokens * sizeof(Lesson) + most_bytes;
  }

 private:
  static constexpr std::uint32_t kNever = ~0u;
  [[nodiscard]] Lesson* oldest_lesson() noexcept;
  /// Nothing before `step`, a lesson's, is to be taken back to any more.
  void forget_before(std::uint32_t step) noexcept;

  std::uint32_t oldest_ = kNever;  ///< tokens, the fewest that it goes back to; those of a lesson, or of the beginning
  std::vector<Lesson> lessons_;    ///< [kUndoTokens] that of a step at step % kUndoTokens; of step 0: there is none
  std::vector<Note> notes_;        ///< of steps behind `oldest_`
};

}  // namespace sluice::scheduler
