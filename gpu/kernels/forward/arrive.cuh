#pragma once

#include "gpu/kernels/forward/near.cuh"

/// What becomes of far rows that are listed to come near, between two forwards. All threads of a plane's block.
namespace sluice::gpu::near {

/// Rows of a stack's plane that are to come near, of all kinds one after the other.
class Arrivals {
 public:
  /// `m`: not of a layer.
  __device__ Arrivals(const ForwardMemory& m, std::uint32_t stack, std::uint32_t plane)
      : Arrivals(m, stack * m.planes() + plane) {}

  /// As it was when this was made.
  [[nodiscard]] __device__ const ForwardArrivals& now() const { return now_; }
  [[nodiscard]] __device__ std::uint32_t count() const { return now_.always + now_.again + now_.first; }
  [[nodiscard]] __device__ std::uint32_t row(std::uint32_t i) const {
    if (i < now_.always) return rows_[i];
    i -= now_.always;
    return i < now_.again ? rows_[room_ + i] : rows_[2 * room_ + i - now_.again];
  }
  [[nodiscard]] __device__ std::uint32_t* always() const { return rows_; }
  [[nodiscard]] __device__ std::uint32_t* again() const { return rows_ + room_; }
  [[nodiscard]] __device__ std::uint32_t* first() const { return rows_ + 2 * room_; }
  /// One thread, when nobody reads it any more.
  __device__ void set(const ForwardArrivals& state) const { state_ = state; }

 private:
  __device__ Arrivals(const ForwardMemory& m, std::uint32_t index)
      : state_(m.arrivals[index]), rows_(m.arriving_of(index)), room_(m.promotions), now_(state_) {}

  ForwardArrivals& state_;
  std::uint32_t* rows_;
  std::uint32_t room_;
  ForwardArrivals now_;
};

/// Rows that were filled beside the last forward are near; those that were not, as that failed, give theirs back.
__device__ inline void settle(const ForwardMemory& m, const Plane& plane, const Arrivals& arrivals) {
  if (!under_way(arrivals.now())) return;
  const bool filled = arrivals.now().state == ForwardArrivals::State::filled;
  const std::uint32_t all = arrivals.count();
  for (std::uint32_t i = threadIdx.x; i < all; i += kThreads) {
    const std::uint32_t row = arrivals.row(i);
    const std::uint32_t place = place_of(plane.near_of[row]);
    plane.near_of[row] = filled ? place | kNearBit : 0;
    if (filled) continue;
    plane.rows[place] = {};
    atomicSub(&m.near_held[row >> m.page_shift], 1);
    atomicSub(&m.state->near_rows, 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) arrivals.set({});
}

/// Leaves those of `count` rows that are as they were listed; returns how many.
__device__ inline std::uint32_t keep_listed(const Plane& plane, std::uint32_t* rows, std::uint32_t count,
                                            std::uint32_t stamp, std::uint32_t (&ballots)[kWarps]) {
  std::uint32_t kept = 0;
  for (std::uint32_t base = 0; base < count; base += kThreads) {
    const std::uint32_t i = base + threadIdx.x;
    const std::uint32_t row = i < count ? rows[i] : kNone;
    const bool mine = row != kNone && plane.near_of[row] == stamp;
    const Places places = places_of(mine, ballots);  // When all have read theirs.
    if (mine) rows[kept + places.before] = row;
    kept += places.all;
  }
  __syncthreads();
  return kept;
}

/// Near rows for what is listed and still as it was: sinks and recent tokens whoever has to give way, then rows that
/// were attended again; then, if none of these had to ask for near rows that were attended not long ago, those that
/// were attended once. Where near memory is scarce a single use is worth less than what it would drive out.
__device__ inline void place(const ForwardMemory& m, const Plane& plane, const Arrivals& arrivals,
                             std::uint32_t forward, std::uint32_t (&ballots)[kWarps], AcquireShared& shared) {
  constexpr std::uint32_t kLastTwo = 1;  // This forward, and the one that listed them.
  const std::uint32_t stamp = stamp_of(arrivals.now().forward);
  const std::uint32_t always_listed = keep_listed(plane, arrivals.always(), arrivals.now().always, stamp, ballots);
  const std::uint32_t again_listed = keep_listed(plane, arrivals.again(), arrivals.now().again, stamp, ballots);
  const std::uint32_t first_listed = keep_listed(plane, arrivals.first(), arrivals.now().first, stamp, ballots);
  const auto acquire_of = [&](const std::uint32_t* rows, std::uint32_t so_far, std::uint32_t most,
                              std::uint32_t patience) {
    return acquire(
        m, plane, so_far, most, forward, forward, patience, [&](std::uint32_t i) { return rows[i]; }, shared,
        kComingBit);
  };
  std::uint32_t always = 0;
  for (const std::uint32_t patience : {kNearPatience, kNearAgain, kLastTwo})
    always = acquire_of(arrivals.always(), always, always_listed, patience);
  const std::uint32_t most_again = min(again_listed, m.promotions - always);
  std::uint32_t again = acquire_of(arrivals.again(), 0, most_again, kNearPatience);
  std::uint32_t first = 0;
  if (again == most_again) {
    first = acquire_of(arrivals.first(), 0, min(first_listed, m.promotions - always - again), kNearPatience);
  } else {
    again = acquire_of(arrivals.again(), again, most_again, kNearAgain);
  }
  if (threadIdx.x != 0) return;
  arrivals.set({.state = ForwardArrivals::State::placed,
                .forward = arrivals.now().forward,
                .always = always,
                .again = again,
                .first = first});
  const std::uint32_t all = always + again + first;
  if (all != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->promoted), all);
}

}  // namespace sluice::gpu::near
