#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "cpu/forward/forward_layer.hpp"

/// Which rows lie near: a cache that the device keeps by itself, a plane of it.
namespace sluice::cpu::near {

using Forward = std::uint32_t;  ///< a forward's number, modulo 2^32

/// How a plane's entry of a far row says that it was attended far in this forward.
inline std::uint32_t stamp_of(Forward forward) noexcept { return forward & (kComingBit - 1); }
inline std::uint32_t since(Forward forward, std::uint32_t stamp) noexcept { return stamp_of(forward - stamp); }

/// Who has to give way: free rows, and those that were not attended in so many forwards; if they are not enough, the
/// next.
using Patience = std::initializer_list<std::uint32_t>;

class Plane {
 public:
  Plane(const ForwardMemory& memory, std::uint32_t plane)
      : m_(memory),
        plane_(plane),
        near_of_(memory.near_of + memory.far_row(plane, 0)),
        rows_(memory.near_rows + memory.near_row(plane, 0), std::size_t{memory.near_pages} * memory.layout.page_tokens),
        hand_(memory.near_hands[plane]) {}

  [[nodiscard]] std::uint32_t& entry(std::uint32_t row) const noexcept { return near_of_[row]; }

  [[nodiscard]] std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(rows_.size()); }
  /// A row that lies near counts as attended.
  void refresh(std::uint32_t row, Forward forward) const noexcept { rows_[place_of(row)].used = forward; }

  void give_up(std::uint32_t row) const noexcept {
    if ((entry(row) & (kNearBit | kComingBit)) != 0) {
      rows_[place_of(row)] = {};
      --m_.state->near_rows;
      hold(row, ~0u);
    }
    entry(row) = 0;
  }
  /// A row whose near one is filled.
  void arrive(std::uint32_t row) const noexcept { entry(row) = place_of(row) | kNearBit; }

  /// Near rows for the first of `wanted`, as many as there are; returns how many that were.
  /// `bit`: kNearBit, or kComingBit where they have to be filled.
  std::uint32_t acquire(std::span<const std::uint32_t> wanted, Forward forward, Forward used, Patience patience,
                        std::uint32_t bit = kNearBit) const {
    std::uint32_t acquired = 0;
    for (const std::uint32_t least : patience) {
      const std::size_t most = std::min<std::size_t>(rows_.size(), kNearLooks);
      for (std::size_t looked = 0; looked < most && acquired < wanted.size(); ++looked) {
        const std::uint32_t place = hand_;
        hand_ = (hand_ + 1) % static_cast<std::uint32_t>(rows_.size());
        if (rows_[place].row == kNone || forward - rows_[place].used > least) put(place, wanted[acquired++], used, bit);
      }
    }
    return acquired;
  }

  void load(const Kernels& kernels, std::uint32_t row) const {
    const std::byte* const from = m_.far_key(plane_, row);
    const float* const scales = m_.far_layout.scaled() ? m_.far_scales(plane_, row) : nullptr;
    std::byte* const to = m_.near_key(plane_, place_of(row));
    copy_near(kernels, m_, from, scales, to);
    copy_near(kernels, m_, from + m_.far_layout.half_bytes(), scales == nullptr ? nullptr : scales + 1,
              to + m_.layout.half_bytes());
  }

 private:
  [[nodiscard]] std::uint32_t place_of(std::uint32_t row) const noexcept {
    return entry(row) & ~(kNearBit | kComingBit);
  }
  void put(std::uint32_t place, std::uint32_t row, Forward used, std::uint32_t bit) const noexcept {
    ForwardNearRow& mine = rows_[place];
    if (mine.row != kNone) {
      entry(mine.row) = stamp_of(mine.used);
      hold(mine.row, ~0u);
    } else {
      ++m_.state->near_rows;
    }
    mine = {.row = row, .used = used};
    entry(row) = place | bit;
    hold(row, 1);
  }
  /// So many more near rows of the row's block. No other thread changes it, but one may look at it.
  void hold(std::uint32_t row, std::uint32_t more) const noexcept {
    const auto held = shared(m_.near_held[row / m_.layout.page_tokens]);
    held.store(held.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  const ForwardMemory& m_;
  std::uint32_t plane_;
  std::uint32_t* near_of_;
  std::span<ForwardNearRow> rows_;
  std::uint32_t& hand_;
};

/// Far rows of one plane that are to come near.
class Arriving {
 public:
  Arriving(const ForwardMemory& memory, std::uint32_t plane)
      : arrivals_(memory.arrivals[plane]), rows_(memory.arriving_of(plane)), most_(memory.promotions) {}

  [[nodiscard]] ForwardArrivals& state() const noexcept { return arrivals_; }
  [[nodiscard]] std::uint32_t most() const noexcept { return most_; }
  [[nodiscard]] bool under_way() const noexcept {
    return arrivals_.state == ForwardArrivals::State::placed || arrivals_.state == ForwardArrivals::State::filled;
  }
  void begin(Forward forward) const noexcept {
    arrivals_ = {.state = ForwardArrivals::State::listed, .forward = forward};
  }
  /// Adds a row to those of a kind, if there is room.
  void add(std::uint32_t ForwardArrivals::*kind, std::uint32_t row) const noexcept {
    std::uint32_t& count = arrivals_.*kind;
    if (count < most_) rows_of(kind)[count++] = row;
  }
  [[nodiscard]] std::span<std::uint32_t> of(std::uint32_t ForwardArrivals::*kind) const noexcept {
    return {rows_of(kind), arrivals_.*kind};
  }
  /// Leaves those of a kind that `stay`.
  template <class Stays>
  void keep(std::uint32_t ForwardArrivals::*kind, const Stays& stays) const noexcept {
    const auto rows = of(kind);
    const auto gone = std::ranges::remove_if(rows, [&](std::uint32_t row) { return !stays(row); });
    arrivals_.*kind -= static_cast<std::uint32_t>(gone.size());
  }
  template <class Body>
  void for_each(const Body& body) const {
    for (const auto kind : {&ForwardArrivals::always, &ForwardArrivals::again, &ForwardArrivals::first}) {
      for (const std::uint32_t row : of(kind)) body(row);
    }
  }

 private:
  [[nodiscard]] std::uint32_t* rows_of(std::uint32_t ForwardArrivals::*kind) const noexcept {
    const std::uint32_t at = kind == &ForwardArrivals::always ? 0 : kind == &ForwardArrivals::again ? 1 : 2;
    return rows_ + std::size_t{at} * most_;
  }

  ForwardArrivals& arrivals_;
  std::uint32_t* rows_;
  std::uint32_t most_;
};

/// Rows that were filled beside the last forward are near; those that were not, as that failed, give theirs back.
void settle(const Plane& plane, const Arriving& arriving);
/// Near rows for what is listed and still as it was.
void place(const Plane& plane, const Arriving& arriving, Forward forward);

}  // namespace sluice::cpu::near
