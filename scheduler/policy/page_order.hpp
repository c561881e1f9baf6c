#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

/// The part of a page that is not attended near: one interval, for sinks cut its front and the recent window its end.
/// Empty if all of it is near.
[[nodiscard]] PageRun far_part(const NearSet& near, std::uint32_t page, std::uint32_t tokens) noexcept;

/// The pages of one KV head in the order in which progressive attention visits them: by the mean of their scores over
/// the group's query heads, ties by larger index; NaN last. Sorted as far as it is read, because as a rule few pages
/// are. Pages that are all near are left out. Reused from step to step.
class PageOrder {
 public:
  /// `scores` [group, pages]. `likely`: pages that will probably be taken, which are sorted at once.
  void rank(std::span<const float> scores, std::uint32_t group, const NearSet& near, std::uint32_t tokens,
            std::uint32_t likely = 0);
  /// Pages that were not taken yet.
  [[nodiscard]] std::uint32_t left() const noexcept { return static_cast<std::uint32_t>(first_.size() + heap_.size()); }
  /// The page that comes next; `left` must not be 0.
  [[nodiscard]] std::uint32_t next() const noexcept {
    if (!first_.empty()) return static_cast<std::uint32_t>(first_.back());
    return static_cast<std::uint32_t>(sorted_ ? heap_.back() : heap_.front());
  }
  /// Appends what is far of the next `count` pages: first the whole ones, then the others, ascending each. Returns how
  /// many are whole.
  std::uint32_t take(std::uint32_t count, std::vector<PageRun>& runs);
  /// [group] log of a bound of what the pages left weigh together: page_tokens * exp(score) each, of scores that bound
  /// those of their tokens, scaled and capped as these are. Infinite if a score is no number. The first call of a
  /// ranking sorts it.
  [[nodiscard]] std::span<const float> bounds(const AttentionShape& shape);

 private:
  [[nodiscard]] std::uint64_t pop();
  void bound_head(std::uint32_t head, const AttentionShape& shape);

  std::span<const float> scores_;
  std::size_t pages_ = 0;  ///< in `scores_`
  std::uint32_t group_ = 0;
  NearSet near_;
  std::uint32_t tokens_ = 0;
  std::vector<float> sums_;           ///< [pages] of the group's scores
  std::vector<std::uint64_t> first_;  ///< ascending, the pages before those of `heap_`
  std::vector<std::uint64_t> heap_;   ///< order of the mean score, then the page
  bool sorted_ = false;              ///< `heap_` is ascending rather than a heap, and `bounds_` is there
  std::vector<float> bounds_;        ///< [left + 1, group] by how many pages are left
};

}  // namespace sluice::scheduler
