#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/kv/block_table.hpp"

namespace sluice::runtime {

/// The blocks of one sequence, in order, and how many of their entries the device's list has right.
class PageList {
 public:
  /// `slot`: the device's list. Room for `max_pages` is reserved, so that growing cannot fail.
  PageList(std::uint32_t slot, std::uint32_t max_pages) : slot_(slot) { blocks_.reserve(max_pages); }

  [[nodiscard]] std::uint32_t slot() const noexcept { return slot_; }
  [[nodiscard]] const std::vector<std::uint32_t>& blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint32_t pages() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }

  void push(std::uint32_t block) noexcept { blocks_.push_back(block); }
  void replace(std::uint32_t page, std::uint32_t block) noexcept {
    blocks_[page] = block;
    synced_ = std::min(synced_, page);
  }
  /// Holds the first `pages` of another sequence's blocks as well; this list must be empty.
  void share(const PageList& other, std::uint32_t pages, BlockTable& table) noexcept {
    for (std::uint32_t i = 0; i < pages; ++i) {
      table.hold(other.blocks_[i]);
      blocks_.push_back(other.blocks_[i]);
    }
  }
  /// Holds a block that others hold or that is kept, as its next page.
  void share(std::uint32_t block, BlockTable& table) noexcept {
    table.hold(block);
    blocks_.push_back(block);
  }
  /// Lets go of all behind the first `pages`.
  void shrink(std::uint32_t pages, BlockTable& table) noexcept {
    for (; blocks_.size() > pages; blocks_.pop_back()) table.release(blocks_.back());
    synced_ = std::min(synced_, pages);
  }

  /// Gives its blocks up without letting go of them: whoever takes them does that.
  [[nodiscard]] std::vector<std::uint32_t> give_up() noexcept {
    synced_ = 0;
    return std::exchange(blocks_, {});
  }

  /// Entries [synced, pages) are not known to the device yet.
  [[nodiscard]] std::uint32_t synced() const noexcept { return synced_; }
  void set_synced() noexcept { synced_ = pages(); }

 private:
  std::uint32_t slot_;
  std::uint32_t synced_ = 0;
  std::vector<std::uint32_t> blocks_;
};

}  // namespace sluice::runtime
