#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// Which blocks of the far pool also lie near: those that came last, and those that are to stay.
class NearBlocks {
 public:
  explicit NearBlocks(std::uint32_t count) : block_of_(count, kNone) {
    for (std::uint32_t i = count; i > 0; --i) free_.push_back(i - 1);
  }

  struct Seat {
    std::uint32_t near = 0;
    std::uint32_t evicted = kNone;  ///< the block that gave way
  };
  /// A place for a block that has none; empty if every place is taken by one that stays.
  [[nodiscard]] std::optional<Seat> bring(std::uint32_t block, bool stays) {
    Seat seat;
    if (!free_.empty()) {
      seat.near = free_.back();
      free_.pop_back();
    } else if (!oldest_.empty()) {
      seat.evicted = oldest_.front();
      seat.near = places_.at(seat.evicted).near;
      forget(seat.evicted);
    } else {
      return std::nullopt;
    }
    block_of_[seat.near] = block;
    const auto at = stays ? oldest_.end() : oldest_.insert(oldest_.end(), block);
    places_[block] = {.near = seat.near, .stays = stays, .order = at};
    return seat;
  }
  /// The block is free again. True if it was near.
  bool drop(std::uint32_t block) {
    const auto place = places_.find(block);
    if (place == places_.end()) return false;
    free_.push_back(place->second.near);
    forget(block);
    return true;
  }

 private:
  struct Place {
    std::uint32_t near = 0;
    bool stays = false;
    std::list<std::uint32_t>::iterator order{};
  };
  void forget(std::uint32_t block) {
    const auto place = places_.find(block);
    block_of_[place->second.near] = kNone;
    if (!place->second.stays) oldest_.erase(place->second.order);
    places_.erase(place);
  }

  std::vector<std::uint32_t> block_of_;
  std::vector<std::uint32_t> free_;
  std::list<std::uint32_t> oldest_;  ///< that may give way, in the order in which they came
  std::unordered_map<std::uint32_t, Place> places_;
};

}  // namespace sluice::runtime
