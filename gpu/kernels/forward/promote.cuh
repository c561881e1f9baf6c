#pragma once

#include <cuda/atomic>

#include "gpu/kernels/forward/near.cuh"

/// Rows that are to come near because they were attended far, by one thread block for each KV head.
namespace sluice::gpu::near {

/// The kinds of ForwardArrivals, while they are counted.
struct Arriving {
  std::uint32_t* rows;  ///< ForwardMemory::arriving_of the plane
  std::uint32_t always;
  std::uint32_t again;
  std::uint32_t first;
};

/// Far ones of the row's sinks and recent tokens.
__device__ inline void want_windows(const ForwardMemory& m, const Plane& plane, const ForwardRow& row,
                                    std::uint32_t forward, Arriving& wanted, std::uint32_t (&ballots)[kWarps]) {
  const std::uint32_t recent = max(row.sink_end, row.recent_begin);
  const std::uint32_t tokens = row.sink_end + row.tokens - recent;
  for (std::uint32_t base = 0; base < tokens && wanted.always < m.promotions; base += kThreads) {
    const std::uint32_t i = base + threadIdx.x;
    std::uint32_t far = kNone;
    if (i < tokens) {
      far = m.row_of(row.list, i < row.sink_end ? i : recent + i - row.sink_end);
      const std::uint32_t entry = plane.near_of[far];
      if ((entry & kNearBit) != 0 || entry == stamp_of(forward)) far = kNone;
    }
    const std::uint32_t before = wanted.always;
    add(wanted.rows, wanted.always, far != kNone, far, m.promotions, ballots);
    // Only what was added counts as wanted.
    for (std::uint32_t w = before + threadIdx.x; w < wanted.always; w += kThreads)
      plane.near_of[wanted.rows[w]] = stamp_of(forward);
    __syncthreads();
  }
}

/// A far row and what its entry said of it.
struct FarSeen {
  std::uint32_t row;  ///< kNone: none that is far
  std::uint32_t entry;
};

/// Adds what is not yet wanted in this forward. All threads, each with a row of its own.
__device__ inline void want(const ForwardMemory& m, const Plane& plane, const FarSeen& seen, std::uint32_t forward,
                            Arriving& wanted, std::uint32_t (&ballots)[kWarps]) {
  const bool mine = seen.row != kNone && seen.entry != stamp_of(forward);
  const bool again = mine && seen.entry != 0 && stamp_of(forward - seen.entry) <= kNearAgain;
  if (mine) plane.near_of[seen.row] = stamp_of(forward);
  const std::uint32_t room = m.promotions;
  if (wanted.again < room) add(wanted.rows + room, wanted.again, again, seen.row, room, ballots);
  if (wanted.first < room) add(wanted.rows + 2 * room, wanted.first, mine && !again, seen.row, room, ballots);
}

/// Of a list that the device has chosen.
__device__ inline void want_listed(const ForwardMemory& m, const Plane& plane, const std::uint32_t* rows,
                                   std::uint32_t far, std::uint32_t forward, Arriving& wanted,
                                   std::uint32_t (&ballots)[kWarps]) {
  for (std::uint32_t base = 0; base < far; base += kThreads) {
    const std::uint32_t i = base + threadIdx.x;
    const std::uint32_t row = i < far ? rows[i] : kNone;
    want(m, plane, {.row = row, .entry = row != kNone ? plane.near_of[row] : 0}, forward, wanted, ballots);
  }
  __syncthreads();  // Another row's list may have the same rows.
}

/// The same of what the CPU has chosen, some of which may lie near. Each way over the link to its list is long.
__device__ inline void want_chosen(const ForwardMemory& m, const Plane& plane, std::uint32_t index,
                                   std::uint32_t forward, Arriving& wanted, std::uint32_t (&ballots)[kWarps]) {
  constexpr std::uint32_t kAtOnce = 8;
  const std::uint32_t count = __ldcv(&m.chosen[index].count);
  const std::uint32_t* const entries = m.chosen_rows + index * m.chosen_room();
  for (std::uint32_t base = 0; base < count; base += kAtOnce * kThreads) {
    std::uint32_t rows[kAtOnce];
    std::uint32_t entries_of[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * kThreads + threadIdx.x;
      rows[k] = i < count ? m.row_of_entry(__ldcv(entries + i)) : kNone;
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) entries_of[k] = rows[k] != kNone ? plane.near_of[rows[k]] : kNearBit;
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      if (base + k * kThreads >= count) break;
      const bool far = (entries_of[k] & kNearBit) == 0;
      want(m, plane, {.row = far ? rows[k] : kNone, .entry = entries_of[k]}, forward, wanted, ballots);
    }
  }
  __syncthreads();  // Another row's list may have the same rows.
}

/// What a KV head's thread block does. What it writes `merge` does not touch, so that both can run at once. `kChosen`:
/// behind `fetch`, which has awaited what the CPU chooses.
template <bool kChosen>
__device__ void promote(const ForwardMemory& m, const ForwardScratch& scratch, std::uint32_t layer,
                        std::uint32_t kv_head) {
  __shared__ std::uint32_t ballots[kWarps];
  __shared__ std::uint32_t with_far[kWarps];
  __shared__ Arriving wanted;
  __shared__ bool runs;
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  if (!near_turn(forward, layer)) return;
  const Plane plane = plane_of(m, m.plane(layer, kv_head));
  ForwardArrivals& arrivals = m.arrivals[plane.index];
  if (threadIdx.x == 0) {
    // One thread says it for all: a merge beside this may abandon the forward at any time.
    const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(m.state->status);
    runs = status.load(cuda::memory_order_relaxed) == ForwardStatus::running;
    if (under_way(arrivals)) runs = false;  // Plans between could not be enqueued.
    wanted = {.rows = m.arriving_of(plane.index), .always = 0, .again = 0, .first = 0};
  }
  __syncthreads();
  if (!runs) return;
  // Which rows have far ones, 256 at a time; most of them have none.
  for (std::uint32_t base = 0; base < m.bucket.decode_rows; base += kThreads) {
    const std::uint32_t r = base + threadIdx.x;
    const ForwardRow mine = r < m.bucket.decode_rows ? m.rows[r].in(layer, m.window) : ForwardRow{};
    const bool keeps = mine.list != kNone && m.keeps_near(mine);
    const bool asks = keeps && (m.far_listed[r * m.shape.kv_heads + kv_head] != 0 || (kChosen && mine.asks != 0));
    const std::uint32_t ballot = __ballot_sync(kAll, asks);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) with_far[threadIdx.x / kWarp] = ballot;
    __syncthreads();
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      for (std::uint32_t rest = with_far[w]; rest != 0; rest &= rest - 1) {
        const std::uint32_t at = base + w * kWarp + __ffs(static_cast<int>(rest)) - 1;
        const std::uint32_t index = at * m.shape.kv_heads + kv_head;
        const std::uint32_t* const rows = scratch.far_rows + std::uint64_t{index} * m.list_room();
        if (m.far_windows[index] != 0) want_windows(m, plane, m.rows[at].in(layer, m.window), forward, wanted, ballots);
        want_listed(m, plane, rows, m.far_listed[index], forward, wanted, ballots);
        if (kChosen && m.rows[at].in(layer, m.window).asks != 0) want_chosen(m, plane, index, forward, wanted, ballots);
      }
    }
  }
  if (threadIdx.x != 0) return;
  arrivals = {.state = ForwardArrivals::State::listed,
              .forward = forward,
              .always = wanted.always,
              .again = wanted.again,
              .first = wanted.first};
}

}  // namespace sluice::gpu::near
