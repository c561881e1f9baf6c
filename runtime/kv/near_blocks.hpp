#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// Which blocks of the far pool also lie near: those that came last, and those that are to stay. Allocates when it is
/// built and never again.
class NearBlocks {
 public:
  NearBlocks(std::uint32_t near_blocks, std::uint32_t blocks) : seats_(near_blocks + 1), seat_of_(blocks, kNone) {
    free_.reserve(near_blocks);
    for (std::uint32_t i = near_blocks; i > 0; --i) free_.push_back(i - 1);
    ends().before = ends().after = near_blocks;
  }

  [[nodiscard]] std::uint32_t used() const noexcept {
    return static_cast<std::uint32_t>(seats_.size() - 1 - free_.size());
  }

  struct Seat {
    std::uint32_t near = 0;
    std::uint32_t evicted = kNone;  ///< the block that gave way
  };
  /// A place for a block that has none; empty if every place is taken by one that stays.
  [[nodiscard]] std::optional<Seat> bring(std::uint32_t block, bool stays) noexcept {
    Seat seat;
    if (!free_.empty()) {
      seat.near = free_.back();
      free_.pop_back();
    } else if (ends().after != end()) {
      seat.near = ends().after;
      seat.evicted = seats_[seat.near].block;
      forget(seat.evicted);
    } else {
      return std::nullopt;
    }
    seat_of_[block] = seat.near;
    seats_[seat.near].block = block;
    if (!stays) join(seat.near);
    return seat;
  }
  /// The block is free again. True if it was near.
  bool drop(std::uint32_t block) noexcept {
    if (seat_of_[block] == kNone) return false;
    free_.push_back(seat_of_[block]);  // Has had room since it was built.
    forget(block);
    return true;
  }

 private:
  /// A place, and its neighbours among those that may give way; alone, if it may not.
  struct Link {
    std::uint32_t block = kNone;
    std::uint32_t before = kNone;
    std::uint32_t after = kNone;
  };
  [[nodiscard]] std::uint32_t end() const noexcept { return static_cast<std::uint32_t>(seats_.size() - 1); }
  [[nodiscard]] Link& ends() noexcept { return seats_.back(); }  ///< behind the newest, before the oldest

  void join(std::uint32_t near) noexcept {
    seats_[near].before = ends().before;
    seats_[near].after = end();
    seats_[ends().before].after = near;
    ends().before = near;
  }
  void forget(std::uint32_t block) noexcept {
    Link& seat = seats_[seat_of_[block]];
    if (seat.after != kNone) {
      seats_[seat.before].after = seat.after;
      seats_[seat.after].before = seat.before;
    }
    seat = {};
    seat_of_[block] = kNone;
  }

  std::vector<Link> seats_;             ///< [near_blocks], then the ends
  std::vector<std::uint32_t> seat_of_;  ///< [blocks]
  std::vector<std::uint32_t> free_;
};

}  // namespace sluice::runtime
