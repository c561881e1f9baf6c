#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/frame_set.hpp"

namespace sluice::runtime {

/// Blocks of the far pool, and how many sequences hold each. Which were freed is kept until the device knows. Allocates
/// when it is built and never again.
class BlockTable {
 public:
  explicit BlockTable(std::uint32_t blocks) : free_(blocks), holders_(blocks, 0), listed_(blocks, false) {
    freed_.reserve(blocks);
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
  /// One more sequence holds it.
  void hold(std::uint32_t block) noexcept { ++holders_[block]; }
  /// One less; when nobody does, it is free.
  void release(std::uint32_t block) noexcept {
    if (--holders_[block] != 0) return;
    free_.insert(block);
    if (!listed_[block]) freed_.push_back(block);  // Has had room since the table was built.
    listed_[block] = true;
  }

  /// Blocks that were freed, each once, taken again or not.
  [[nodiscard]] std::span<const std::uint32_t> freed() const noexcept { return freed_; }
  void forget_freed() noexcept {
    for (const std::uint32_t block : freed_) listed_[block] = false;
    freed_.clear();
  }

 private:
  cpu::FrameSet free_;
  std::vector<std::uint32_t> holders_;  ///< [blocks]
  std::vector<std::uint32_t> freed_;
  std::vector<bool> listed_;  ///< [blocks] in freed_
};

}  // namespace sluice::runtime
