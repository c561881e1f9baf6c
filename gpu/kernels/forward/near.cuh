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

__device__ inline std::uint32_t stamp_of(std::uint32_t forward) { return forward & (kComingBit - 1); }
__device__ inline std::uint32_t place_of(std::uint32_t entry) { return entry & (kComingBit - 1); }

/// Whether rows have near ones that are being filled.
__device__ inline bool under_way(const ForwardArrivals& arrivals) {
  return arrivals.state == ForwardArrivals::State::placed || arrivals.state == ForwardArrivals::State::filled;
}

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

/// `row` gets near row `place`, which held `held`. Whether that was free. `bit`: kNearBit, or kComingBit where it has
/// to be filled.
__device__ inline bool put(const ForwardMemory& m, const Plane& plane, std::uint32_t place, const ForwardNearRow& held,
                           std::uint32_t row, std::uint32_t used, std::uint32_t bit) {
  const bool free = held.row == kNone;
  if (!free) {
    plane.near_of[held.row] = stamp_of(held.used);
    atomicSub(&m.near_held[held.row >> m.page_shift], 1);
  }
  atomicAdd(&m.near_held[row >> m.page_shift], 1);  // Other planes' thread blocks count there, too.
  plane.rows[place] = {.row = row, .used = used};
  plane.near_of[row] = place | bit;
  return free;
}

/// Near rows that a thread looks at together: one after the other each would take as long as all of them.
inline constexpr std::uint32_t kLooks = 8;

/// What threads say of kLooks near rows each, and how many of the rows before say yes: in rounds of as many rows as
/// threads.
struct Votes {
  std::uint32_t ballots[kLooks];  ///< of this warp
  std::uint32_t before[kLooks];   ///< in earlier rounds, and in this one's earlier warps
  std::uint32_t all;
  /// Of `round`, those before this thread's.
  [[nodiscard]] __device__ std::uint32_t rank(std::uint32_t round) const {
    return before[round] + __popc(ballots[round] & ((1u << threadIdx.x % kWarp) - 1));
  }
};
/// @param yes  bit k: this thread's of round k
__device__ inline Votes votes_of(std::uint32_t yes, std::uint32_t (&counts)[kLooks * kWarps]) {
  static_assert(kLooks * kWarps == 2 * kWarp);  // Two for each lane of the warp that adds them up.
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  Votes votes;
#pragma unroll
  for (std::uint32_t k = 0; k < kLooks; ++k) votes.ballots[k] = __ballot_sync(kAll, (yes >> k & 1) != 0);
  __syncthreads();  // The counts of the turn before have been read.
  if (lane == 0) {
#pragma unroll
    for (std::uint32_t k = 0; k < kLooks; ++k) counts[k * kWarps + warp] = __popc(votes.ballots[k]);
  }
  __syncthreads();
  const std::uint32_t first = counts[2 * lane];
  const std::uint32_t both = first + counts[2 * lane + 1];
  std::uint32_t sum = both;
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) {
    const std::uint32_t below = __shfl_up_sync(kAll, sum, step);
    sum += lane >= step ? below : 0;
  }
  votes.all = __shfl_sync(kAll, sum, kWarp - 1);
#pragma unroll
  for (std::uint32_t k = 0; k < kLooks; ++k) {
    const std::uint32_t at = k * kWarps + warp;
    const auto from = static_cast<int>(at / 2);
    const std::uint32_t even = __shfl_sync(kAll, sum - both, from);
    const std::uint32_t odd = __shfl_sync(kAll, sum - both + first, from);
    votes.before[k] = at % 2 == 0 ? even : odd;
  }
  return votes;
}

/// What acquire() needs of shared memory.
struct AcquireShared {
  std::uint32_t counts[kLooks * kWarps];
  std::uint32_t next;
};

/// Near rows for `wanted` rows, row_at(i) of them, as many as there are: free ones, and those that were not attended
/// in `patience` forwards. `acquired` of them have one already; returns how many have then. All threads.
template <class RowAt>
__device__ inline std::uint32_t acquire(const ForwardMemory& m, const Plane& plane, std::uint32_t acquired,
                                        std::uint32_t wanted, std::uint32_t forward, std::uint32_t used,
                                        std::uint32_t patience, const RowAt& row_at, AcquireShared& s,
                                        std::uint32_t bit = kNearBit) {
  if (acquired >= wanted) return acquired;
  const std::uint32_t begin = *plane.hand;
  const std::uint32_t most = min(plane.count, kNearLooks);
  const auto place_of = [&](std::uint32_t look) {  // At most as many looks as there are near rows.
    const std::uint32_t place = begin + look;
    return place >= plane.count ? place - plane.count : place;
  };
  if (threadIdx.x == 0) s.next = place_of(most);  // Unless one of the looks is the last.
  std::uint32_t freed = 0;
  for (std::uint32_t looked = threadIdx.x; looked - threadIdx.x < most && acquired < wanted;
       looked += kLooks * kThreads) {
    ForwardNearRow held[kLooks];
#pragma unroll
    for (std::uint32_t k = 0; k < kLooks; ++k) {
      if (looked + k * kThreads < most) held[k] = plane.rows[place_of(looked + k * kThreads)];
    }
    std::uint32_t gives_way = 0;
#pragma unroll
    for (std::uint32_t k = 0; k < kLooks; ++k) {
      const bool there = looked + k * kThreads < most;
      if (there && (held[k].row == kNone || forward - held[k].used > patience)) gives_way |= 1u << k;
    }
    const Votes votes = votes_of(gives_way, s.counts);
#pragma unroll
    for (std::uint32_t k = 0; k < kLooks; ++k) {
      const std::uint32_t at = acquired + votes.rank(k);
      if ((gives_way >> k & 1) == 0 || at >= wanted) continue;
      const std::uint32_t place = place_of(looked + k * kThreads);
      freed += put(m, plane, place, held[k], row_at(at), used, bit) ? 1 : 0;
      // The next time looks begin behind the last one that was needed.
      if (at + 1 == wanted) s.next = place + 1 == plane.count ? 0 : place + 1;
    }
    acquired = min(acquired + votes.all, wanted);
  }
  __syncthreads();
  if (threadIdx.x == 0) *plane.hand = s.next;
  freed = __reduce_add_sync(kAll, freed);
  if (threadIdx.x % kWarp == 0 && freed != 0) atomicAdd(&m.state->near_rows, freed);
  __syncthreads();
  return acquired;
}

/// Adds the rows of the threads that want theirs, in their order, as far as there is room. All threads; `count` is
/// shared by them.
__device__ inline void add(std::uint32_t* rows, std::uint32_t& count, bool mine, std::uint32_t row, std::uint32_t most,
                           std::uint32_t (&ballots)[kWarps]) {
  const Places places = places_of(mine, ballots);
  const std::uint32_t at = count + places.before;
  if (mine && at < most) rows[at] = row;
  __syncthreads();
  if (threadIdx.x == 0) count = min(count + places.all, most);
  __syncthreads();
}

/// Rows that are wanted, in the order in which they were found.
struct Wanted {
  std::uint32_t count;
  std::uint32_t rows[kMostPromotions];
};
__device__ inline void add(Wanted& wanted, bool mine, std::uint32_t row, std::uint32_t most,
                           std::uint32_t (&ballots)[kWarps]) {
  add(wanted.rows, wanted.count, mine, row, most, ballots);
}

}  // namespace sluice::gpu::near
