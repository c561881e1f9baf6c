#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/decode.hpp"

namespace sluice::runtime {

/// What the device does not know yet of lists and near blocks. Allocates when it is built and never again: a block
/// joins one list at most before the device knows, and has one place.
class PendingChanges {
 public:
  explicit PendingChanges(std::uint32_t blocks) : changed_(blocks, 0) {
    lists_.reserve(blocks);
    near_.reserve(blocks);
  }

  void list(const DecodeListChange& change) noexcept { lists_.push_back(change); }
  /// The newest of a block counts.
  void near(const DecodeNearChange& change) noexcept {
    if (changed_[change.block] != 0) {
      near_[changed_[change.block] - 1] = change;
    } else {
      near_.push_back(change);
      changed_[change.block] = static_cast<std::uint32_t>(near_.size());
    }
  }
  /// A list that ends needs none of its changes.
  void forget_list(std::uint32_t list) noexcept {
    std::erase_if(lists_, [list](const DecodeListChange& change) { return change.list == list; });
  }

  [[nodiscard]] std::span<const DecodeListChange> lists() const noexcept { return lists_; }
  [[nodiscard]] std::span<const DecodeNearChange> near() const noexcept { return near_; }
  void clear() noexcept {
    for (const DecodeNearChange& change : near_) changed_[change.block] = 0;
    lists_.clear();
    near_.clear();
  }

 private:
  std::vector<DecodeListChange> lists_;
  std::vector<DecodeNearChange> near_;
  std::vector<std::uint32_t> changed_;  ///< [blocks] place in near_, counted from 1; 0: none
};

}  // namespace sluice::runtime
