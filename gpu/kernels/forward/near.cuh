#pragma once

#include "gpu/kernels/forward/forward.hpp"

/// Which rows lie near: a cache that the device keeps by itself. As on the host device, but for the order in which far
/// rows are listed, and so for which of too many come near.
namespace sluice::gpu::near {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
inline constexpr std::uint32_t kAll = 0xffff'ffffu;
/// Rows give way that were not attended in this forward, however lately before.
inline constexpr std::uint32_t kNoPatience = 0;

/// A plane, as the one thread block that changes it sees it.
struct Plane {
  std::uint32_t* near_of;
  ForwardNearRow* rows;
  std::uint32_t* hand;
  std::uint32_t index;
  std::uint32_t count;  ///< near rows
};
__device__ inline Plane plane_of(const ForwardMemory& m, std::uint32_t index) {
  return {.near_of = m.near_of + m.far_row(index, 0),
          .rows = m.near_rows + m.near_row(index, 0),
          .hand = m.near_hands + index,
          .index = index,
          .count = m.near_pages * m.layout.page_tokens};
}

__device__ inline std::uint32_t stamp_of(std::uint32_t forward) { return forward & ~kNearBit; }

/// How many of the threads before this one, and of all, say yes. All threads.
struct Places {
  std::uint32_t before;
  std::uint32_t all;
};
__device__ inline Places places_of(bool yes, std::uint32_t (&ballots)[kWarps]) {
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t ballot = __ballot_sync(kAll, yes);
  __syncthreads();  // The ballots of the turn before have been read.
  if (threadIdx.x % kWarp == 0) ballots[warp] = ballot;
  __syncthreads();
  Places places{.before = static_cast<std::uint32_t>(__popc(ballot & ((1u << threadIdx.x % kWarp) - 1))), .all = 0};
  for (std::uint32_t w = 0; w < kWarps; ++w) {
    const auto here = static_cast<std::uint32_t>(__popc(ballots[w]));
    if (w < warp) places.before += here;
    places.all += here;
  }
  return places;
}

/// `row` gets a near row. Whether that was free.
__device__ inline bool put(const ForwardMemory& m, const Plane& plane, std::uint32_t place, std::uint32_t row,
                           std::uint32_t used) {
  ForwardNearRow& mine = plane.rows[place];
  const bool free = mine.row == kNone;
  if (!free) {
    plane.near_of[mine.row] = stamp_of(mine.used);
    atomicSub(&m.near_held[mine.row >> m.page_shift], 1);
  }
  atomicAdd(&m.near_held[row >> m.page_shift], 1);  // Other planes' thread blocks count there, too.
  mine = {.row = row, .used = used};
  plane.near_of[row] = place | kNearBit;
  return free;
}

/// Near rows for `wanted` rows, row_at(i) of them, as many as there are: free ones, and those that were not attended
/// in `patience` forwards. `acquired` of them have one already; returns how many have then. All threads.
template <class RowAt>
__device__ inline std::uint32_t acquire(const ForwardMemory& m, const Plane& plane, std::uint32_t acquired,
                                        std::uint32_t wanted, std::uint32_t forward, std::uint32_t used,
                                        std::uint32_t patience, const RowAt& row_at, std::uint32_t (&ballots)[kWarps]) {
  std::uint32_t hand = *plane.hand;
  std::uint32_t last = hand;  // Row behind the last one that was taken, or looked at.
  std::uint32_t freed = 0;
  const std::uint32_t most = min(plane.count, kNearLooks);
  for (std::uint32_t looked = 0; looked < most && acquired < wanted; looked += kThreads) {
    const bool there = looked + threadIdx.x < most;
    std::uint32_t place = hand + threadIdx.x;
    while (place >= plane.count) place -= plane.count;
    bool gives_way = false;
    if (there) {
      const ForwardNearRow row = plane.rows[place];
      gives_way = row.row == kNone || forward - row.used > patience;
    }
    const Places places = places_of(gives_way, ballots);
    const bool mine = gives_way && acquired + places.before < wanted;
    const bool was_free = mine && put(m, plane, place, row_at(acquired + places.before), used);
    freed += static_cast<std::uint32_t>(__syncthreads_count(was_free));
    const bool enough = acquired + places.all >= wanted;
    // The thread that took the last one knows where to go on.
    __shared__ std::uint32_t next;
    if (enough ? mine && acquired + places.before + 1 == wanted : threadIdx.x == min(most - looked, kThreads) - 1)
      next = place + 1 == plane.count ? 0 : place + 1;
    __syncthreads();
    last = hand = next;
    acquired = min(acquired + places.all, wanted);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *plane.hand = last;
    if (freed != 0) atomicAdd(&m.state->near_rows, freed);
  }
  __syncthreads();
  return acquired;
}

/// Rows that are wanted, in the order in which they were found.
struct Wanted {
  std::uint32_t count;
  std::uint32_t rows[kMostPromotions];
};

/// Adds the rows of the threads that want theirs, in their order, as far as there is room. All threads.
__device__ inline void add(Wanted& wanted, bool mine, std::uint32_t row, std::uint32_t most,
                           std::uint32_t (&ballots)[kWarps]) {
  const Places places = places_of(mine, ballots);
  const std::uint32_t at = wanted.count + places.before;
  if (mine && at < most) wanted.rows[at] = row;
  __syncthreads();
  if (threadIdx.x == 0) wanted.count = min(wanted.count + places.all, most);
  __syncthreads();
}

}  // namespace sluice::gpu::near
