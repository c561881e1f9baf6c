#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/history/score_table.hpp"
#include "scheduler/undo.hpp"

namespace sluice::scheduler {

/// What one observed step changed in the tables of a KV head's query heads: per head its tables' scalars and, of each
/// observed token, the two codes that stood there before. 5 bytes a token, as tokens are kept by the gaps between them.
struct Lesson {
  struct Head {
    std::uint32_t head = 0;
    std::uint32_t tokens = 0;
    ScoreTable::Undo vertical, slash;
  };

  std::uint32_t step = 0;          ///< tokens that were visible
  std::vector<Head> heads;         ///< those that observed something
  std::vector<ScoreCode> codes;    ///< of each of them: [tokens] of the vertical table, [tokens] of the slash table
  std::vector<std::uint8_t> gaps;  ///< of each of them, see `add_gaps`

  void clear(std::uint32_t of_step) noexcept;
  /// Room for the codes of a head's tokens, which are ascending; they become part of the lesson with `add`.
  [[nodiscard]] ScoreCode* reserve(std::span<const std::uint32_t> tokens);
  void add(const Head& head) { heads.push_back(head); }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(heads, codes, gaps); }
  /// What the lesson of `group` query heads holds at most that observe `observed` of `tokens` tokens each.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint32_t group, std::uint32_t observed,
                                                     std::uint32_t tokens) noexcept;
};

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
