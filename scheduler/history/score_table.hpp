#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/history/compact_score.hpp"
#include "scheduler/history/score_step.hpp"
#include "scheduler/prefetch.hpp"

namespace sluice::scheduler {

/// One decayed score per entry (LFPS spec section 5) in 16 bits, so that "which entries exceed the threshold?" costs a
/// comparison per 32 entries and 32 more per answer, not one per entry.
///
/// A score is S = U * g. U is stored, as a ScoreCode; g is one factor for the whole table, so a decay is one product.
/// In U, scores only rise: maxima are running ones, and the moments that the threshold needs are sums in float64 of
/// what is stored, which only grow. When g becomes small, its power of two moves into U, exactly.
///
/// Each weight that is added rounds its entry by a share kScoreError at most, and errors decay as scores do: a score is
/// off by a share kScoreError / (1 - decay) at most, 1% with 0.95 (a tenth of that as a rule, as errors cancel), and
/// by what is forgotten below kSmallestScore / kSmallestUnit of the largest weight.
///
/// A step, one decay and what is added then, can be taken back: the entries that it changed are as they were, and so is
/// what `decay` returned. Codes that are forgotten therefore stay where they are for kUndoTokens steps more, and only
/// count for nothing; then g's power of two moves, and no step that can still be taken back misses them.
///
/// Every 32 entries have their largest score in a list of its own, in which whole blocks are left out. 2 bytes per
/// entry and 2 per block; nothing if there are no entries.
class ScoreTable {
 public:
  /// Sums of U, U^2, U^3 and U^4.
  struct Moments {
    double first = 0.0, second = 0.0, third = 0.0, fourth = 0.0;
    void replace(double from, double to) noexcept;
    void scale(int octaves) noexcept;
  };

  /// All but the entries.
  struct State {
    double g = 1.0;
    Moments sums;
    ScoreCode max = 0;
    ScoreCode dead = 0;       ///< codes up to this are forgotten: they count as 0
    std::uint8_t rested = 0;  ///< steps since they are
  };
  /// The threshold of eq. (8), form R1, in stored units U, rounded down: stored() > mean, stored() > threshold.
  struct Cut {
    ScoreCode mean = 0;
    ScoreCode threshold = 0;  ///< mean + alpha * (max - mean) / sqrt(kurtosis)
    bool uniform = true;      ///< no variance (or no entries): nothing stands out, kurtosis is undefined
  };

  /// g falls no lower than this before it is folded into U.
  static constexpr double kSmallestUnit = 0x1p-16;

  /// Replaces the table by these scores, all >= 0; one of 2^16 or more may count as less.
  void assign(std::span<const float> scores);
  /// Appends zero entries up to `size`. A smaller size is ignored.
  void extend(std::uint32_t size);
  /// Drops the entries from `size` on, which must be 0. A larger size is ignored.
  void shrink(std::uint32_t size) noexcept;
  struct Undo {
    State before;              ///< the decay
    std::uint8_t octaves = 0;  ///< by which all codes were lowered, as g became small
    bool lossy = false;        ///< and some of them forgotten at once: the step cannot be taken back
  };
  /// S *= factor, for every entry. `factor` in (0, 1].
  /// @return what takes the step back
  Undo decay(double factor);
  /// S[indices[i]] += weights[i]; weights are >= 0, indices below size() and best in order of memory. What this changes
  /// goes to `changes`, unless that is null.
  void add(std::span<const std::uint32_t> indices, const float* weights, ScoreChange* changes = nullptr);
  /// How `add` changes entries, until the next decay.
  [[nodiscard]] ScoreStep step() const noexcept { return {.per_weight = 1.0 / state_.g, .dead = state_.dead}; }
  struct Entry {
    std::uint32_t index = 0;
    ScoreCode code = 0;
  };
  /// Takes the newest step back: next() [count] are the entries that `add` changed, as they were before; their indices
  /// rise or fall.
  template <class Next>
  void undo(const Undo& step, std::uint32_t count, const Next& next) noexcept {
    std::uint32_t last = kNoBlock;
    for (std::uint32_t i = 0; i < count; ++i) {
      const Entry entry = next();
      codes()[entry.index] = entry.code;
      if (last != kNoBlock && last != entry.index / kBlock) find_most(last);
      last = entry.index / kBlock;
    }
    if (last != kNoBlock) find_most(last);
    take_back(step);
  }

  [[nodiscard]] Cut cut(double alpha) const;

  /// Calls visit(index) for every entry with a stored score above `threshold`, ascending. Returns how many entries were
  /// looked at.
  template <class Visit>
  std::size_t for_each_above(ScoreCode threshold, Visit&& visit) const {
    threshold = std::max(threshold, state_.dead);
    // Blocks lie lines apart: all are asked for before the first is looked at.
    for_each_block_above(threshold, [&](std::size_t block) { prefetch(u_.data() + block); });
    std::size_t looked_at = 0;
    for_each_block_above(threshold, [&](std::size_t block) {
      looked_at += kBlock;
      for (std::uint32_t bits = above(u_[block], threshold); bits != 0; bits &= bits - 1) {
        visit(static_cast<std::uint32_t>(block * kBlock) + static_cast<std::uint32_t>(std::countr_zero(bits)));
      }
    });
    return looked_at;
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  /// [size()] U.
  [[nodiscard]] const ScoreCode* stored() const noexcept { return u_.empty() ? nullptr : u_.front().codes; }
  [[nodiscard]] double score(std::uint32_t index) const noexcept {
    return static_cast<double>(from_code(live(stored()[index]))) * state_.g;
  }
  [[nodiscard]] double sum() const noexcept { return state_.sums.first * state_.g; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(u_, most_); }
  /// What a table of `size` entries holds at most, however it grew.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint32_t size) noexcept;

 private:
  static constexpr std::uint32_t kBlock = 32;
  static constexpr std::uint32_t kNoBlock = ~0u;

  /// A line of the cache.
  struct alignas(64) Block {
    ScoreCode codes[kBlock];
  };
  /// Bit i: codes[i] is above `threshold`.
  [[nodiscard]] static std::uint32_t above(const Block& block, ScoreCode threshold) noexcept;
  /// Calls visit(i) for every block i in which an entry is above `threshold`, ascending.
  template <class Visit>
  void for_each_block_above(ScoreCode threshold, const Visit& visit) const {
    for (std::size_t i = 0; i < most_.size(); ++i) {
      for (std::uint32_t bits = above(most_[i], threshold); bits != 0; bits &= bits - 1) {
        visit(i * kBlock + static_cast<std::size_t>(std::countr_zero(bits)));
      }
    }
  }
  [[nodiscard]] ScoreCode* codes() noexcept { return u_.empty() ? nullptr : u_.front().codes; }
  [[nodiscard]] ScoreCode& most_of(std::uint32_t index) noexcept {
    return most_[index / (kBlock * kBlock)].codes[index / kBlock % kBlock];
  }
  [[nodiscard]] ScoreCode live(ScoreCode code) const noexcept { return code > state_.dead ? code : ScoreCode{0}; }
  /// Room for `size` entries.
  void resize(std::uint32_t size);
  /// Multiplies U by 2^-octaves and g by 2^octaves. Exact, except that what falls below kSmallestScore becomes 0.
  /// @return whether anything did
  bool fold(std::uint32_t octaves) noexcept;
  void find_most(std::uint32_t block) noexcept;
  void take_back(const Undo& step) noexcept;

  std::uint32_t size_ = 0;
  std::vector<Block> u_;     ///< [size] 0 behind the last entry
  std::vector<Block> most_;  ///< [blocks of u_] largest of each, likewise
  State state_;
};

}  // namespace sluice::scheduler
