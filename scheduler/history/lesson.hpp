#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/history/bit_stream.hpp"
#include "scheduler/history/score_step.hpp"
#include "scheduler/history/score_table.hpp"
#include "scheduler/history/weight_code.hpp"

namespace sluice::scheduler {

/// What one observed step changed in the tables of a KV head's query heads, in some two bytes per observed token.
///
/// What stood in a table before a weight was added to it is almost told by what stands there since: the codes that the
/// weight turns into that one are neighbours, often only one, and the rank of the old code among them is all that is
/// kept. Whoever takes the step back finds them by the same arithmetic, from the weight and from what the table holds.
struct Lesson {
  /// Both tables of a head decay together: of their scalars, only sums and maxima differ.
  struct Head {
    ScoreTable::Moments vertical_sums, slash_sums;  ///< before the step, like all the table's
    double g = 1.0;
    float scale = 0.f;         ///< weight of code 0
    std::uint32_t tokens = 0;  ///< 1 at least
    ScoreCode vertical_max = 0, slash_max = 0, dead = 0;
    std::uint8_t rested = 0;
    std::uint8_t octaves = 0;
    std::uint8_t head = 0;
    std::uint8_t gap_bits = 0;     ///< of Rice's code of the gaps between tokens
    std::uint8_t weight_bits = 0;  ///< and of how far below `largest` the weights' codes are
    WeightCode largest = 0;

    [[nodiscard]] static Head of(std::uint32_t head, float scale, const ScoreTable::Undo& vertical,
                                 const ScoreTable::Undo& slash) noexcept;
    [[nodiscard]] ScoreTable::Undo vertical() const noexcept { return undo(vertical_sums, vertical_max); }
    [[nodiscard]] ScoreTable::Undo slash() const noexcept { return undo(slash_sums, slash_max); }

   private:
    [[nodiscard]] ScoreTable::Undo undo(const ScoreTable::Moments& sums, ScoreCode max) const noexcept {
      return {.before = {.g = g, .sums = sums, .max = max, .dead = dead, .rested = rested}, .octaves = octaves};
    }
  };
  /// What was added to a table.
  struct Change {
    ScoreStep step;
    const ScoreChange* entries = nullptr;  ///< [tokens]
  };

  std::uint32_t step = 0;           ///< tokens that were visible
  std::vector<Head> heads;          ///< those that observed something
  std::vector<std::uint64_t> bits;  ///< of each of them, from a word on: its tokens and weights, the ranks of what
                                    ///< stood in its vertical table, and in its slash table

  void clear(std::uint32_t of_step) noexcept;
  /// Room for one head more that observed so many tokens.
  void reserve(std::size_t tokens);
  /// `tokens`, ascending, and `codes` say what was observed; `head`: what Head::of makes. Needs no memory behind
  /// `reserve`.
  void add(Head head, std::span<const std::uint32_t> tokens, const WeightCode* codes, const Change& vertical,
           const Change& slash) noexcept;
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(heads, bits); }
};

/// Reads the tokens of a lesson's head, ascending, and the weights.
class LessonTokens {
 public:
  struct Observed {
    std::uint32_t token = 0;
    float weight = 0.f;
  };
  LessonTokens(const Lesson::Head& head, const BitReader& bits) noexcept : head_(head), bits_(bits) {}
  [[nodiscard]] Observed next() noexcept {
    token_ += bits_.get_rice(head_.gap_bits);
    const std::uint32_t code = head_.largest - bits_.get_rice(head_.weight_bits);
    return {.token = token_, .weight = kWeights[code] * head_.scale};
  }
  /// What follows the last token: the ranks of its vertical table.
  [[nodiscard]] BitReader ranks() const noexcept {
    LessonTokens all = *this;
    for (std::uint32_t i = 0; i < head_.tokens; ++i) (void)all.next();
    return all.bits_;
  }

 private:
  const Lesson::Head& head_;
  BitReader bits_;
  std::uint32_t token_ = 0;
};

/// Where a lesson's tokens stand in the tables: see GroupHistory.
struct LessonScope {
  std::uint32_t tokens = 0;  ///< visible
  std::uint32_t sinks = 0;
};

/// Leaves both tables as they were before the step, their size apart. `bits` begin with the head's.
/// @return those of the next head
BitReader take_back(const Lesson::Head& head, const BitReader& bits, const LessonScope& scope, ScoreTable& vertical,
                    ScoreTable& slash) noexcept;

}  // namespace sluice::scheduler
