// Which rows lie near: a cache that the device keeps by itself. As on the host device, but for the order in which far
// rows are listed, and so for which of too many come near.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarps = kThreads / kWarp;
constexpr std::uint32_t kAll = 0xffff'ffffu;
/// Rows give way that were not attended in this forward, however lately before.
constexpr std::uint32_t kNoPatience = 0;

/// A plane, as the one thread block that changes it sees it.
struct Plane {
  std::uint32_t* near_of;
  ForwardNearRow* rows;
  std::uint32_t* hand;
  std::uint32_t index;
  std::uint32_t count;  ///< near rows
};
__device__ Plane plane_of(const ForwardMemory& m, std::uint32_t index) {
  return {.near_of = m.near_of + m.far_row(index, 0),
          .rows = m.near_rows + m.near_row(index, 0),
          .hand = m.near_hands + index,
          .index = index,
          .count = m.near_pages * m.layout.page_tokens};
}

__device__ std::uint32_t stamp_of(std::uint32_t forward) { return forward & ~kNearBit; }

/// How many of the threads before this one, and of all, say yes. All threads.
struct Places {
  std::uint32_t before;
  std::uint32_t all;
};
__device__ Places places_of(bool yes, std::uint32_t (&ballots)[kWarps]) {
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
__device__ bool put(const Plane& plane, std::uint32_t place, std::uint32_t row, std::uint32_t used) {
  ForwardNearRow& mine = plane.rows[place];
  const bool free = mine.row == kNone;
  if (!free) plane.near_of[mine.row] = stamp_of(mine.used);
  mine = {.row = row, .used = used};
  plane.near_of[row] = place | kNearBit;
  return free;
}

/// Near rows for `wanted` rows, row_at(i) of them, as many as there are: free ones, and those that were not attended
/// in `patience` forwards. `acquired` of them have one already; returns how many have then. All threads.
template <class RowAt>
__device__ std::uint32_t acquire(const ForwardMemory& m, const Plane& plane, std::uint32_t acquired,
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
    const bool was_free = mine && put(plane, place, row_at(acquired + places.before), used);
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
__device__ void add(Wanted& wanted, bool mine, std::uint32_t row, std::uint32_t most,
                    std::uint32_t (&ballots)[kWarps]) {
  const Places places = places_of(mine, ballots);
  const std::uint32_t at = wanted.count + places.before;
  if (mine && at < most) wanted.rows[at] = row;
  __syncthreads();
  if (threadIdx.x == 0) wanted.count = min(wanted.count + places.all, most);
  __syncthreads();
}

/// Near rows for tokens that come, of prompts or decoded ones, but for the first `skip` of these. Those that have one
/// count as used in that forward. All threads.
template <class... Patience>
__device__ void acquire_coming(const ForwardMemory& m, std::uint32_t stack, const Plane& plane, bool decoded,
                               std::uint32_t skip, std::uint32_t used, Wanted& wanted,
                               std::uint32_t (&ballots)[kWarps], Patience... patiences) {
  static_assert(kThreads <= kMostPromotions);
  const std::uint32_t tokens = m.state->bucket.rows();
  const auto forward = static_cast<std::uint32_t>(m.state->planned);
  std::uint32_t passed = 0;
  for (std::uint32_t base = 0; base < tokens; base += kThreads) {
    const ForwardToken token = base + threadIdx.x < tokens ? m.tokens[base + threadIdx.x] : ForwardToken{};
    const bool comes = token.list != kNone && (token.decoded != 0) == decoded;
    const Places turn = places_of(comes, ballots);
    const bool mine = comes && passed + turn.before >= skip;
    passed += turn.all;
    const std::uint32_t row = mine ? m.row_of(stack * m.list_count + token.list, token.position) : kNone;
    const std::uint32_t entry = mine ? plane.near_of[row] : 0;
    if ((entry & kNearBit) != 0) plane.rows[entry & ~kNearBit].used = used;
    if (threadIdx.x == 0) wanted.count = 0;
    __syncthreads();
    add(wanted, mine && (entry & kNearBit) == 0, row, kThreads, ballots);
    const std::uint32_t count = wanted.count;
    const auto at = [&](std::uint32_t i) { return wanted.rows[i]; };
    std::uint32_t acquired = 0;
    ((acquired = acquire(m, plane, acquired, count, forward, used, patiences, at, ballots)), ...);
    if (acquired < count) return;
  }
}

/// Thread block i: plane i. When a slip's lists and tokens have been taken.
__global__ void __launch_bounds__(kThreads) acquire_kernel(const __grid_constant__ ForwardMemory m) {
  __shared__ std::uint32_t ballots[kWarps];
  __shared__ std::uint32_t blocks[kThreads];
  __shared__ Wanted wanted;
  const Plane plane = plane_of(m, blockIdx.x);
  const std::uint32_t page_tokens = m.layout.page_tokens;
  const std::uint32_t all = m.slip->freed_blocks;
  std::uint32_t freed = 0;
  for (std::uint32_t base = 0; base < all; base += kThreads) {
    const std::uint32_t some = min(all - base, kThreads);
    __syncthreads();
    if (threadIdx.x < some) blocks[threadIdx.x] = m.slip_freed[base + threadIdx.x];  // Many at once over the link.
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < some * page_tokens; i += kThreads) {
      const std::uint32_t row = blocks[i / page_tokens] * page_tokens + i % page_tokens;
      const std::uint32_t entry = plane.near_of[row];
      plane.near_of[row] = 0;
      if ((entry & kNearBit) == 0) continue;
      plane.rows[entry & ~kNearBit] = {};
      ++freed;
    }
  }
  if (freed != 0) atomicSub(&m.state->near_rows, freed);
  __syncthreads();
  const auto forward = static_cast<std::uint32_t>(m.state->planned);
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack)
    acquire_coming(m, stack, plane, true, 0, forward, wanted, ballots, kNearPatience, kNearAgain, kNoPatience);
  std::uint32_t prompts = 0;
  for (std::uint32_t i = threadIdx.x; i - threadIdx.x < m.state->bucket.rows(); i += kThreads) {
    const ForwardToken token = i < m.state->bucket.rows() ? m.tokens[i] : ForwardToken{};
    prompts += static_cast<std::uint32_t>(__syncthreads_count(token.list != kNone && token.decoded == 0));
  }
  // The newest of prompts, and in their order, so that the oldest give way first later on.
  const std::uint32_t most = min(prompts, plane.count);
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack)
    acquire_coming(m, stack, plane, false, prompts - most, forward - kNearPatience, wanted, ballots, kNearPatience);
}

/// Far ones of the row's sinks and recent tokens.
__device__ void want_windows(const ForwardMemory& m, const Plane& plane, const ForwardRow& row, std::uint32_t forward,
                             Wanted& wanted, std::uint32_t (&ballots)[kWarps]) {
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

/// Far rows that were attended far not long before.
__device__ void want_again(const ForwardMemory& m, const Plane& plane, const std::uint32_t* rows, std::uint32_t far,
                           std::uint32_t forward, Wanted& wanted, std::uint32_t (&ballots)[kWarps]) {
  for (std::uint32_t base = 0; base < far; base += kThreads) {
    const std::uint32_t i = base + threadIdx.x;
    const std::uint32_t row = i < far ? rows[i] : kNone;
    bool again = false;
    if (row != kNone) {
      const std::uint32_t entry = plane.near_of[row];
      const std::uint32_t since = (forward - entry) & ~kNearBit;
      again = entry != 0 && entry != stamp_of(forward) && since <= kNearAgain;
      plane.near_of[row] = stamp_of(forward);
    }
    if (wanted.count < m.promotions) add(wanted, again, row, m.promotions, ballots);
  }
  __syncthreads();  // Another row's list may have the same rows.
}

__device__ void load(const ForwardMemory& m, const Plane& plane, const Wanted& wanted, std::uint32_t acquired) {
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
__device__ void load_scaled(const ForwardMemory& m, const Plane& plane, const Wanted& wanted, std::uint32_t acquired) {
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

/// Thread block i: KV head i.
template <bool kScaled>
__global__ void __launch_bounds__(kThreads)
    promote_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                   std::uint32_t layer) {
  __shared__ std::uint32_t ballots[kWarps];
  __shared__ std::uint32_t with_far[kWarps];
  __shared__ Wanted always, again;
  detail::wait_for_kernel_before();
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  if (m.state->status != ForwardStatus::running || (forward + layer) % kNearTurn != 0) return;
  if (threadIdx.x == 0) always.count = again.count = 0;
  __syncthreads();
  const Plane plane = plane_of(m, m.plane(layer, blockIdx.x));
  // Which rows have far ones, 256 at a time; most of them have none.
  for (std::uint32_t base = 0; base < m.bucket.decode_rows; base += kThreads) {
    const std::uint32_t r = base + threadIdx.x;
    const ForwardRow mine = r < m.bucket.decode_rows ? m.rows[r].in(layer, m.window) : ForwardRow{};
    const bool asks = mine.list != kNone && !mine.whole() && m.far_listed[r * m.shape.kv_heads + blockIdx.x] != 0;
    const std::uint32_t ballot = __ballot_sync(kAll, asks);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) with_far[threadIdx.x / kWarp] = ballot;
    __syncthreads();
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      for (std::uint32_t rest = with_far[w]; rest != 0; rest &= rest - 1) {
        const std::uint32_t at = base + w * kWarp + __ffs(static_cast<int>(rest)) - 1;
        const std::uint32_t index = at * m.shape.kv_heads + blockIdx.x;
        const std::uint32_t* const rows = scratch.far_rows + std::uint64_t{index} * m.list_room();
        if (m.far_windows[index] != 0) want_windows(m, plane, m.rows[at].in(layer, m.window), forward, always, ballots);
        want_again(m, plane, rows, m.far_listed[index], forward, again, ballots);
      }
    }
  }
  const auto acquire_all = [&](const Wanted& wanted, std::uint32_t most, std::uint32_t so_far, std::uint32_t patience) {
    return acquire(
        m, plane, so_far, most, forward, forward, patience, [&](std::uint32_t i) { return wanted.rows[i]; }, ballots);
  };
  std::uint32_t acquired = 0;
  for (const std::uint32_t patience : {kNearPatience, kNearAgain, kNoPatience})
    acquired = acquire_all(always, always.count, acquired, patience);
  const std::uint32_t left = min(again.count, m.promotions - acquired);
  std::uint32_t others = 0;
  for (const std::uint32_t patience : {kNearPatience, kNearAgain}) others = acquire_all(again, left, others, patience);
  if constexpr (kScaled) {
    load_scaled(m, plane, always, acquired);
    load_scaled(m, plane, again, others);
  } else {
    load(m, plane, always, acquired);
    load(m, plane, again, others);
  }
  if (threadIdx.x == 0 && acquired + others != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->promoted), acquired + others);
}

}  // namespace

void launch_forward_acquire(const ForwardMemory& memory, cudaStream_t stream) {
  acquire_kernel<<<memory.planes(), kThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that finds near rows for tokens");
}

void launch_forward_promote(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  OverlappingLaunch(memory.shape.kv_heads, kThreads, 0, static_cast<cudaStream_t>(layer.stream))
      .run(memory.far_layout.scaled() ? promote_kernel<true> : promote_kernel<false>,
           "launch the kernel that brings rows near", memory, scratch, layer.layer);
}

namespace detail {
void load_forward_near_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, acquire_kernel), "load the kernels of near rows");
  check(cudaFuncGetAttributes(&attributes, promote_kernel<false>), "load the kernels of near rows");
  check(cudaFuncGetAttributes(&attributes, promote_kernel<true>), "load the kernels of near rows");
}
}  // namespace detail

}  // namespace sluice::gpu
