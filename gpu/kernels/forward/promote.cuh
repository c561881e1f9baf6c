#pragma once

#include <cuda/atomic>

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/near.cuh"

/// Rows that are brought near because they were attended far, by one thread block for each KV head.
namespace sluice::gpu::near {

/// Far ones of the row's sinks and recent tokens.
__device__ inline void want_windows(const ForwardMemory& m, const Plane& plane, const ForwardRow& row,
                                    std::uint32_t forward, Wanted& wanted, std::uint32_t (&ballots)[kWarps]) {
  const std::uint32_t recent = max(row.sink_end, row.recent_begin);
  const std::uint32_t tokens = row.sink_end + row.tokens - recent;
  for (std::uint32_t base = 0; base < tokens && wanted.count < m.promotions; base += kThreads) {
    const std::uint32_t i = base + threadIdx.x;
    std::uint32_t far = kNone;
    if (i < tokens) {
      far = m.row_of(row.list, i < row.sink_end ? i : recent + i - row.sink_end);
      const std::uint32_t entry = plane.near_of[far];
      if ((entry & kNearBit) != 0 || entry == stamp_of(forward)) far = kNone;
    }
    const std::uint32_t before = wanted.count;
    add(wanted, far != kNone, far, m.promotions, ballots);
    // Only what was added counts as wanted.
    for (std::uint32_t w = before + threadIdx.x; w < wanted.count; w += kThreads)
      plane.near_of[wanted.rows[w]] = stamp_of(forward);
    __syncthreads();
  }
}

/// Rows that are wanted near because they were attended far.
struct FarWanted {
  Wanted always;  ///< of sinks and recent tokens
  Wanted again;   ///< attended far not long before, too
  Wanted first;   ///< the others
};

/// A far row and what its entry said of it.
struct FarSeen {
  std::uint32_t row;  ///< kNone: none that is far
  std::uint32_t entry;
};

/// Adds what is not yet wanted in this forward. All threads, each with a row of its own.
__device__ inline void want(const ForwardMemory& m, const Plane& plane, const FarSeen& seen, std::uint32_t forward,
                            FarWanted& wanted, std::uint32_t (&ballots)[kWarps]) {
  const bool mine = seen.row != kNone && seen.entry != stamp_of(forward);
  const bool again = mine && seen.entry != 0 && ((forward - seen.entry) & ~kNearBit) <= kNearAgain;
  if (mine) plane.near_of[seen.row] = stamp_of(forward);
  if (wanted.again.count < m.promotions) add(wanted.again, again, seen.row, m.promotions, ballots);
  if (wanted.first.count < m.promotions) add(wanted.first, mine && !again, seen.row, m.promotions, ballots);
}

/// Of a list that the device has chosen.
__device__ inline void want_listed(const ForwardMemory& m, const Plane& plane, const std::uint32_t* rows,
                                   std::uint32_t far, std::uint32_t forward, FarWanted& wanted,
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
                                   std::uint32_t forward, FarWanted& wanted, std::uint32_t (&ballots)[kWarps]) {
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

__device__ inline void load(const ForwardMemory& m, const Plane& plane, const Wanted& wanted, std::uint32_t acquired) {
  constexpr std::uint32_t kAtOnce = 8;  // Each way over the link is long.
  const auto quads = static_cast<std::uint32_t>(m.layout.row_bytes() / sizeof(uint4));
  const std::uint32_t all = 2 * quads * acquired;
  const auto half = [&](std::uint32_t i) { return i / quads % 2 * m.layout.half_bytes(); };
  for (std::uint32_t base = threadIdx.x; base < all; base += kAtOnce * kThreads) {
    uint4 read[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * kThreads;
      if (i >= all) continue;
      const std::byte* const from = m.far_key(plane.index, wanted.rows[i / (2 * quads)]) + half(i);
      read[k] = __ldcv(reinterpret_cast<const uint4*>(from) + i % quads);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * kThreads;
      if (i >= all) continue;
      const std::uint32_t place = plane.near_of[wanted.rows[i / (2 * quads)]] & ~kNearBit;
      reinterpret_cast<uint4*>(m.near_key(plane.index, place) + half(i))[i % quads] = read[k];
    }
  }
}

/// The same of rows with scales, which are unfolded.
__device__ inline void load_scaled(const ForwardMemory& m, const Plane& plane, const Wanted& wanted,
                                   std::uint32_t acquired) {
  constexpr std::uint32_t kAtOnce = 8;
  const auto quads = static_cast<std::uint32_t>(m.far_layout.row_bytes() / sizeof(uint4));
  const std::uint32_t all = 2 * quads * acquired;
  for (std::uint32_t base = threadIdx.x; base < all; base += kAtOnce * kThreads) {
    uint4 read[kAtOnce];
    float scale[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * kThreads;
      if (i >= all) continue;
      const std::uint32_t row = wanted.rows[i / (2 * quads)];
      const std::uint32_t half = i / quads % 2;
      const std::byte* const from = m.far_key(plane.index, row) + half * m.far_layout.half_bytes();
      read[k] = __ldcv(reinterpret_cast<const uint4*>(from) + i % quads);
      scale[k] = __ldcv(reinterpret_cast<const float*>(m.far_scale_bytes(plane.index, row)) + half);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * kThreads;
      if (i >= all) continue;
      const std::uint32_t place = plane.near_of[wanted.rows[i / (2 * quads)]] & ~kNearBit;
      std::byte* const to = m.near_key(plane.index, place) + i / quads % 2 * m.layout.half_bytes();
      uint4* const unfolded = reinterpret_cast<uint4*>(to) + 2 * (i % quads);
      unfolded[0] = detail::unfold_codes(make_uint2(read[k].x, read[k].y), scale[k]);
      unfolded[1] = detail::unfold_codes(make_uint2(read[k].z, read[k].w), scale[k]);
    }
  }
}

/// Near rows for what is wanted, which are filled: sinks and recent tokens whoever has to give way, then rows that were
/// attended again; then, if none of these had to ask for near rows that were attended not long ago, those that were
/// attended once. Where near memory is scarce a single use is worth less than what it would drive out.
template <bool kScaled>
__device__ inline void bring(const ForwardMemory& m, const Plane& plane, const FarWanted& wanted, std::uint32_t forward,
                             AcquireShared& shared) {
  const auto acquire_of = [&](const Wanted& rows, std::uint32_t so_far, std::uint32_t most, std::uint32_t patience) {
    return acquire(
        m, plane, so_far, most, forward, forward, patience, [&](std::uint32_t i) { return rows.rows[i]; }, shared);
  };
  std::uint32_t always = 0;
  for (const std::uint32_t patience : {kNearPatience, kNearAgain, kNoPatience})
    always = acquire_of(wanted.always, always, wanted.always.count, patience);
  const std::uint32_t most_again = min(wanted.again.count, m.promotions - always);
  std::uint32_t again = acquire_of(wanted.again, 0, most_again, kNearPatience);
  std::uint32_t first = 0;
  if (again == most_again) {
    first = acquire_of(wanted.first, 0, min(wanted.first.count, m.promotions - always - again), kNearPatience);
  } else {
    again = acquire_of(wanted.again, again, most_again, kNearAgain);
  }
  const auto fill = [&](const Wanted& rows, std::uint32_t acquired) {
    if constexpr (kScaled) {
      load_scaled(m, plane, rows, acquired);
    } else {
      load(m, plane, rows, acquired);
    }
  };
  fill(wanted.always, always);
  fill(wanted.again, again);
  fill(wanted.first, first);
  const std::uint32_t all = always + again + first;
  if (threadIdx.x == 0 && all != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->promoted), all);
}

/// What a KV head's thread block does. It reads and writes near rows and what is known of them, which the `merge` of
/// the layer does not, so that both can run at once. `kChosen`: behind `fetch`, which has awaited what the CPU chooses.
template <bool kScaled, bool kChosen>
__device__ void promote(const ForwardMemory& m, const ForwardScratch& scratch, std::uint32_t layer,
                        std::uint32_t kv_head) {
  __shared__ std::uint32_t ballots[kWarps];
  __shared__ std::uint32_t with_far[kWarps];
  __shared__ FarWanted wanted;
  __shared__ AcquireShared shared;
  __shared__ bool runs;
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  if ((forward + layer) % kNearTurn != 0) return;
  if (threadIdx.x == 0) {
    // One thread says it for all: a merge beside this may abandon the forward at any time.
    const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(m.state->status);
    runs = status.load(cuda::memory_order_relaxed) == ForwardStatus::running;
    wanted.always.count = wanted.again.count = wanted.first.count = 0;
  }
  __syncthreads();
  if (!runs) return;
  const Plane plane = plane_of(m, m.plane(layer, kv_head));
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
        if (m.far_windows[index] != 0)
          want_windows(m, plane, m.rows[at].in(layer, m.window), forward, wanted.always, ballots);
        want_listed(m, plane, rows, m.far_listed[index], forward, wanted, ballots);
        if (kChosen && m.rows[at].in(layer, m.window).asks != 0) want_chosen(m, plane, index, forward, wanted, ballots);
      }
    }
  }
  bring<kScaled>(m, plane, wanted, forward, shared);
}

}  // namespace sluice::gpu::near
