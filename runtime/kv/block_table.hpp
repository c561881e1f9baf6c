#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/frame_set.hpp"
#include "sluice/forward.hpp"

namespace sluice::runtime {

/// Blocks of the far pool, and how many sequences hold each. Which were taken and freed is kept until the device knows.
/// Allocates when it is built and never again.
class BlockTable {
 public:
  explicit BlockTable(std::uint32_t blocks) : free_(blocks), holders_(blocks, 0), change_of_(blocks, 0) {
    changes_.reserve(blocks);
  }

  [[nodiscard]] std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(holders_.size()); }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_.size(); }
  /// Sequences that hold it.
  [[nodiscard]] std::uint32_t holders(std::uint32_t block) const noexcept { return holders_[block]; }

  /// A block that nobody held; there must be one.
  [[nodiscard]] std::uint32_t take() noexcept {
    const std::uint32_t block = free_.take_lowest();
    holders_[block] = 1;
    return block;
  }
  /// One that holds nothing yet. `age`: see ForwardBlockChange.
  [[nodiscard]] std::uint32_t take_fresh(std::uint32_t age) noexcept {
    const std::uint32_t block = take();
    change({.block = block, .age = age});
    return block;
  }
  /// One more sequence holds it.
  void hold(std::uint32_t block) noexcept { ++holders_[block]; }
  /// One less; when nobody does, it is free.
  void release(std::uint32_t block) noexcept {
    if (--holders_[block] != 0) return;
    change({.block = block});
    free_.insert(block);
  }

  /// What the device does not know; each block once.
  [[nodiscard]] std::span<const ForwardBlockChange> changes() const noexcept { return changes_; }
  void forget_changes() noexcept {
    for (const ForwardBlockChange& change : changes_) change_of_[change.block] = 0;
    changes_.clear();
  }

 private:
  /// The newest of a block counts.
  void change(const ForwardBlockChange& change) noexcept {
    if (change_of_[change.block] != 0) {
      changes_[change_of_[change.block] - 1] = change;
    } else {
      changes_.push_back(change);
      change_of_[change.block] = static_cast<std::uint32_t>(changes_.size());
    }
  }

  cpu::FrameSet free_;
  std::vector<std::uint32_t> holders_;  ///< [blocks]
  std::vector<ForwardBlockChange> changes_;
  std::vector<std::uint32_t> change_of_;  ///< [blocks] place in changes_, counted from 1; 0: none
};

}  // namespace sluice::runtime
