#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/machine/frame_set.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// Blocks of the far pool: how many sequences hold each, and whether the prefix cache keeps it. A block is free (nobody
/// does either), held (some sequence does, whether it is kept or not) or idle (kept and held by none). Idle ones are in
/// the order in which they came to be. Blocks whose near rows are to be given up are listed until the device knows.
/// Allocates when it is built and never again.
class BlockTable {
 public:
  explicit BlockTable(std::uint32_t blocks)
      : free_(blocks), holders_(blocks, 0), kept_(blocks, false), listed_(blocks, false), order_(blocks + 1) {
    freed_.reserve(blocks);
    order_.back() = {.older = blocks, .newer = blocks};
  }

  [[nodiscard]] std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(holders_.size()); }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_.size(); }
  [[nodiscard]] std::uint32_t idle() const noexcept { return idle_; }
  /// Sequences that hold it.
  [[nodiscard]] std::uint32_t holders(std::uint32_t block) const noexcept { return holders_[block]; }
  [[nodiscard]] bool kept(std::uint32_t block) const noexcept { return kept_[block]; }
  /// Whether it is held or idle, not free.
  [[nodiscard]] bool in_use(std::uint32_t block) const noexcept { return holders_[block] != 0 || kept_[block]; }
  /// Whether a sequence that holds it must not write into it.
  [[nodiscard]] bool shared(std::uint32_t block) const noexcept { return holders_[block] > 1 || kept_[block]; }
  /// The block that has been idle for the longest time; there must be one.
  [[nodiscard]] std::uint32_t oldest_idle() const noexcept { return order_.back().newer; }

  /// A free block; there must be one.
  [[nodiscard]] std::uint32_t take() noexcept {
    const std::uint32_t block = free_.take_lowest();
    holders_[block] = 1;
    return block;
  }
  /// One more sequence holds a block that is not free.
  void hold(std::uint32_t block) noexcept {
    if (holders_[block]++ == 0) unlink(block);
  }
  /// One less.
  void release(std::uint32_t block) noexcept {
    if (--holders_[block] != 0) return;
    give_up_near(block);
    kept_[block] ? link(block) : free_.insert(block);
  }
  /// The cache keeps a block that some sequence holds.
  void keep(std::uint32_t block) noexcept { kept_[block] = true; }
  /// No longer.
  void drop(std::uint32_t block) noexcept {
    kept_[block] = false;
    if (holders_[block] != 0) return;
    unlink(block);
    give_up_near(block);
    free_.insert(block);
  }

  void give_up_near(std::uint32_t block) noexcept {
    if (!listed_[block]) freed_.push_back(block);  // Has had room since the table was built.
    listed_[block] = true;
  }
  /// Blocks whose near rows are to be given up, each once, taken again or not.
  [[nodiscard]] std::span<const std::uint32_t> freed() const noexcept { return freed_; }
  void forget_freed() noexcept {
    for (const std::uint32_t block : freed_) listed_[block] = false;
    freed_.clear();
  }

 private:
  struct Order {
    std::uint32_t older = kNone;
    std::uint32_t newer = kNone;
  };

  /// Becomes the newest of the idle blocks.
  void link(std::uint32_t block) noexcept {
    const std::uint32_t before = order_.back().older;
    order_[block] = {.older = before, .newer = blocks()};
    order_[before].newer = order_.back().older = block;
    ++idle_;
  }
  void unlink(std::uint32_t block) noexcept {
    order_[order_[block].older].newer = order_[block].newer;
    order_[order_[block].newer].older = order_[block].older;
    --idle_;
  }

  cpu::FrameSet free_;
  std::vector<std::uint32_t> holders_;  ///< [blocks]
  std::vector<bool> kept_;              ///< [blocks]
  std::vector<std::uint32_t> freed_;
  std::vector<bool> listed_;  ///< [blocks] in freed_
  std::vector<Order> order_;  ///< [blocks + 1] a ring of those that are idle; the last is where it ends
  std::uint32_t idle_ = 0;
};

}  // namespace sluice::runtime
