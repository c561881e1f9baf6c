#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"

namespace sluice::scheduler {

/// One decayed score per entry (LFPS spec section 5), kept so that "which entries exceed the threshold?" costs
/// O(answer), not O(entries).
///
/// A score is S = U * g. U is stored, in float32; g is one factor for the whole table, so a decay is one product.
/// In U, scores only rise: the maximum is a running one, and the moments that the threshold needs are
/// sums in float64 that only grow. When g becomes small, its power of two moves into U, exactly.
///
/// Entries above the mean (and some below) are listed by bucket, two buckets per octave of U, unordered. The
/// threshold is never below the mean, so its answer is the lists above it and part of one list. An entry
/// knows its place in its list, hence moves in O(1); one below the floor knows nothing, and the floor
/// rises with the mean, list by list. About 8 bytes per entry and 4 per listed entry; 3 KiB besides, once there are
/// scores.
class ScoreTable {
 public:
  /// The threshold of eq. (8), form R1, in stored units U. Compare in float32: u > mean, u > threshold.
  struct Cut {
    float mean = 0.f;
    float threshold = 0.f;  ///< mean + alpha * (max - mean) / sqrt(kurtosis)
    bool uniform = true;    ///< no variance (or no entries): nothing stands out, kurtosis is undefined
  };

  /// Replaces the table by these scores, all >= 0 and finite.
  void assign(std::span<const float> scores);
  /// Appends zero entries up to `size`. A smaller size is ignored.
  void extend(std::uint32_t size);
  /// S *= factor, for every entry. `factor` in (0, 1].
  void decay(double factor);
  /// S[indices[i]] += weights[i]; weights are >= 0, indices below size() and best in order of memory.
  void add(std::span<const std::uint32_t> indices, const float* weights);

  /// Also lets the floor of the lists follow the mean.
  [[nodiscard]] Cut cut(double alpha);

  /// Calls visit(index) for every entry with u > threshold, in no order. `threshold` must come from `cut`.
  /// Returns how many entries were looked at.
  template <class Visit>
  std::size_t for_each_above(float threshold, Visit&& visit) const {
    std::size_t looked_at = 0;
    const std::uint32_t boundary = bucket_of(threshold);
    for (std::uint32_t bucket = top_; bucket > boundary && bucket >= floor_; --bucket) {
      const auto& list = lists_[bucket % kLists];
      looked_at += list.size();
      for (const std::uint32_t index : list) visit(index);
    }
    if (boundary < floor_ || boundary > top_) return looked_at;
    const auto& list = lists_[boundary % kLists];
    for (const std::uint32_t index : list) {
      if (u_[index] > threshold) visit(index);
    }
    return looked_at + list.size();
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(u_.size()); }
  /// [size()], in stored units.
  [[nodiscard]] const float* stored() const noexcept { return u_.data(); }
  /// g: a score is its stored value times this.
  [[nodiscard]] double unit() const noexcept { return g_; }
  [[nodiscard]] double score(std::uint32_t index) const noexcept { return u_[index] * g_; }
  [[nodiscard]] double sum() const noexcept { return m1_ * g_; }
  /// Entries that lists hold, for tests of their size.
  [[nodiscard]] std::size_t listed() const noexcept;
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(u_, place_, lists_); }

 private:
  // A live list lies between mean / 2 and max <= size * mean, at most 33 octaves: a ring of 64 never wraps
  // onto itself.
  static constexpr std::uint32_t kBucketsPerOctave = 2;
  static constexpr std::uint32_t kLists = 64 * kBucketsPerOctave;
  static constexpr std::uint32_t kUnlisted = 0xffff'ffffu;  ///< floor of a table without scores

  /// Order-preserving: exponent and the top mantissa bit. 0 for 0.
  [[nodiscard]] static std::uint32_t bucket_of(float u) noexcept;
  void fold();
  void rebuild_lists();
  void raise_floor(std::uint32_t floor);
  void move(std::uint32_t index, std::uint32_t from, std::uint32_t to);

  std::vector<float> u_;
  std::vector<std::uint32_t> place_;  ///< [size] position in its list; meaningless while bucket_of(u) < floor_
  std::vector<std::vector<std::uint32_t>> lists_;  ///< bucket b is in lists_[b % kLists]; none without scores
  std::uint32_t floor_ = kUnlisted;                ///< lowest listed bucket; never above the mean's
  std::uint32_t top_ = 0;                          ///< highest bucket that any entry has reached
  double g_ = 1.0;
  double per_weight_ = 1.0;                           ///< 1 / g
  double m1_ = 0.0, m2_ = 0.0, m3_ = 0.0, m4_ = 0.0;  ///< sums of U, U^2, U^3, U^4
  float max_ = 0.f;
};

}  // namespace sluice::scheduler
