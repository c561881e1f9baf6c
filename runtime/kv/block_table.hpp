#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/frame_set.hpp"
#include "runtime/kv/near_blocks.hpp"
#include "sluice/forward.hpp"

namespace sluice::runtime {

/// Blocks of the far pool: how many sequences hold each, and which of them also lie near. What the device does not know
/// yet of the latter is kept until it does. Allocates when it is built and never again.
class BlockTable {
 public:
  BlockTable(std::uint32_t blocks, std::uint32_t near_blocks)
      : free_(blocks), holders_(blocks, 0), near_(near_blocks, blocks), change_of_(blocks, 0) {
    changes_.reserve(blocks);
  }

  [[nodiscard]] std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(holders_.size()); }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_.size(); }
  [[nodiscard]] std::uint32_t near() const noexcept { return near_.used(); }
  /// Sequences that hold it.
  [[nodiscard]] std::uint32_t holders(std::uint32_t block) const noexcept { return holders_[block]; }

  /// A block that nobody held; there must be one.
  [[nodiscard]] std::uint32_t take() noexcept {
    const std::uint32_t block = free_.take_lowest();
    holders_[block] = 1;
    return block;
  }
  /// One more sequence holds it.
  void hold(std::uint32_t block) noexcept { ++holders_[block]; }
  /// One less; when nobody does, it is free and no longer near.
  void release(std::uint32_t block) noexcept {
    if (--holders_[block] != 0) return;
    if (near_.drop(block)) change({.block = block});
    free_.insert(block);
  }
  /// Rows of it that are written from now on are written near, too, if there is a place; one that `stays` is not given
  /// up for others. It must be empty.
  void bring_near(std::uint32_t block, bool stays) noexcept {
    const auto seat = near_.bring(block, stays);
    if (!seat) return;
    if (seat->evicted != kNone) change({.block = seat->evicted});
    change({.block = block, .near = seat->near});
  }

  /// What the device does not know; each block once.
  [[nodiscard]] std::span<const ForwardNearChange> near_changes() const noexcept { return changes_; }
  void forget_changes() noexcept {
    for (const ForwardNearChange& change : changes_) change_of_[change.block] = 0;
    changes_.clear();
  }

 private:
  /// The newest of a block counts.
  void change(const ForwardNearChange& change) noexcept {
    if (change_of_[change.block] != 0) {
      changes_[change_of_[change.block] - 1] = change;
    } else {
      changes_.push_back(change);
      change_of_[change.block] = static_cast<std::uint32_t>(changes_.size());
    }
  }

  cpu::FrameSet free_;
  std::vector<std::uint32_t> holders_;  ///< [blocks]
  NearBlocks near_;
  std::vector<ForwardNearChange> changes_;
  std::vector<std::uint32_t> change_of_;  ///< [blocks] place in changes_, counted from 1; 0: none
};

}  // namespace sluice::runtime
