#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::cpu {

/// A set of frame indices below a fixed limit that gives out its smallest member quickly: one bit per
/// frame, and one bit per word of those, so that a search over full words reads 4,096 frames at a time.
class FrameSet {
 public:
  /// All of [0, frames).
  explicit FrameSet(std::uint32_t frames)
      : words_(div_up(frames, 64), ~std::uint64_t{0}), summary_(div_up(words_.size(), 64), 0), size_(frames) {
    if (frames % 64 != 0) words_.back() = (std::uint64_t{1} << (frames % 64)) - 1;
    for (std::size_t w = 0; w < words_.size(); ++w) summary_[w / 64] |= bit(w);
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] bool contains(std::uint32_t frame) const noexcept { return (words_[frame / 64] & bit(frame)) != 0; }

  void insert(std::uint32_t frame) noexcept {
    const std::size_t word = frame / 64;
    words_[word] |= bit(frame);
    summary_[word / 64] |= bit(word);
    if (word / 64 < lowest_) lowest_ = word / 64;
    ++size_;
  }

  /// The set must not be empty.
  std::uint32_t take_lowest() noexcept {
    while (summary_[lowest_] == 0) ++lowest_;
    const std::size_t word = lowest_ * 64 + static_cast<std::size_t>(std::countr_zero(summary_[lowest_]));
    const auto frame =
        static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(std::countr_zero(words_[word]));
    words_[word] &= words_[word] - 1;
    if (words_[word] == 0) summary_[lowest_] &= ~bit(word);
    --size_;
    return frame;
  }

 private:
  static constexpr std::uint64_t bit(std::size_t index) noexcept { return std::uint64_t{1} << (index % 64); }

  std::vector<std::uint64_t> words_;
  std::vector<std::uint64_t> summary_;  ///< bit w: words_[w] is not zero
  std::size_t lowest_ = 0;              ///< no summary word below this one is set
  std::uint32_t size_;
};

}  // namespace sluice::cpu
