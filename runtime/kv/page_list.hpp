#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "runtime/kv/block_table.hpp"

namespace sluice::runtime {

/// The blocks of one sequence and stack of layers, in order, and how many of their entries the device's list has right.
/// Of layers with windows the first pages may have been passed: their entries are kNone.
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
  /// Pages that it has none of any more.
  [[nodiscard]] std::uint32_t passed() const noexcept { return passed_; }
  /// Those that it has.
  [[nodiscard]] std::span<const std::uint32_t> held() const noexcept { return std::span(blocks_).subspan(passed_); }

  /// Holds the first `pages` of another sequence's blocks as well; this list must be empty.
  void share(const PageList& other, std::uint32_t pages, BlockTable& table) noexcept {
    skip(std::min(other.passed_, pages));
    for (std::uint32_t i = passed_; i < pages; ++i) share(other.blocks_[i], table);
  }
  /// An empty list goes on behind as many pages that it does not have.
  void skip(std::uint32_t pages) noexcept {
    blocks_.resize(pages, kNone);  // Has had room since the list was made.
    passed_ = pages;
  }
  /// Lets go of all before that page.
  void pass(std::uint32_t pages, BlockTable& table) noexcept {
    for (; passed_ < std::min(pages, this->pages()); ++passed_)
      table.release(std::exchange(blocks_[passed_], kNone));
  }
  /// Holds a block that others hold or that is kept, as its next page.
  void share(std::uint32_t block, BlockTable& table) noexcept {
    table.hold(block);
    blocks_.push_back(block);
  }
  /// Lets go of all behind the first `pages`.
  void shrink(std::uint32_t pages, BlockTable& table) noexcept {
    for (; blocks_.size() > std::max(pages, passed_); blocks_.pop_back()) table.release(blocks_.back());
    blocks_.resize(std::min<std::size_t>(blocks_.size(), pages));
    passed_ = std::min(passed_, pages);
    synced_ = std::min(synced_, pages);
  }

  /// Gives its blocks up without letting go of them: whoever takes them, and has room for them, does that.
  void give_up(std::vector<std::uint32_t>& to) noexcept {
    to.insert(to.end(), held().begin(), held().end());
    blocks_.clear();
    synced_ = passed_ = 0;
  }

  /// Entries [synced, pages) are not known to the device yet.
  [[nodiscard]] std::uint32_t synced() const noexcept { return synced_; }
  void set_synced() noexcept { synced_ = pages(); }

 private:
  std::uint32_t slot_;
  std::uint32_t synced_ = 0;
  std::uint32_t passed_ = 0;
  std::vector<std::uint32_t> blocks_;
};

}  // namespace sluice::runtime
