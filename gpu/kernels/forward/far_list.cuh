#pragma once

#include "gpu/kernels/forward/split.cuh"

/// Far rows that are listed in device memory, and sent across the link by one warp when all are known: a thread block
/// that has sent something itself waits for the link before it can say so.
namespace sluice::gpu::forward {

/// Lists the far rows of what is marked, the blocks' parts one after the other; returns what all have found. Near rows
/// are listed for an audit alone. All threads of the cluster, which a barrier of it follows before any block ends:
/// blocks read in each other's `own`.
__device__ inline Listed list_far(const ForwardMemory& m, const Work& work, Listed& own, Found& found,
                                  const Part& part) {
  Listed mine;
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    found.find(m, work, base);
    found.for_each([&](std::uint32_t, bool, const Sums& sums) { mine.add(sums); });
  }
  if (threadIdx.x == 0) own = mine;
  detail::cluster_sync_own();
  const std::uint32_t b = threadIdx.x % kWarp;
  const bool there = b < part.blocks();
  const std::uint32_t near = there ? detail::load_in_cluster(detail::address_in(&own.near, b)) : 0;
  const std::uint32_t far = there ? detail::load_in_cluster(detail::address_in(&own.far, b)) : 0;
  const bool before = b < part.rank();
  Listed at{.near = __reduce_add_sync(kAll, before ? near : 0), .far = __reduce_add_sync(kAll, before ? far : 0)};
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    if (part.count() > found.turn()) found.find(m, work, base);  // Else it is there still.
    found.for_each([&](std::uint32_t entry, bool is_one, const Sums& sums) {
      const bool is_near = (entry & kNearBit) != 0;
      if (is_one && !is_near) work.far_rows[at.far + (sums.before >> 16)] = entry;
      if (is_near && m.bucket.audit)
        work.near_rows[at.near + (sums.before & 0xffffu)] = m.near_entry(work.plane, entry & ~kNearBit);
      at.add(sums);
    });
  }
  __syncthreads();
  return {.near = __reduce_add_sync(kAll, near), .far = __reduce_add_sync(kAll, far)};
}

/// All far lists of a layer, from device memory to where the workers look for them. One warp.
__device__ inline void send_lists(const ForwardMemory& m, const std::uint32_t* far_rows) {
  constexpr std::uint32_t kLines = 8;  // That are read at once, of 32 rows each.
  const std::uint32_t lists = gridDim.y * gridDim.z;
  const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (std::uint32_t first = 0; first < lists; first += kWarp) {
    const std::uint32_t count = first + lane < lists ? __ldcg(m.far_listed + first + lane) : 0;
    if (first + lane < lists) m.far_counts[first + lane] = count;
    const std::uint32_t lines = (count + kWarp - 1) / kWarp;
    const std::uint32_t behind = top_k::inclusive_sum(lines);
    const std::uint32_t all = __shfl_sync(kAll, behind, kWarp - 1);
#pragma unroll 1
    for (std::uint32_t line = 0; line < all; line += kLines) {
      std::uint64_t at[kLines];
      std::uint32_t rows[kLines];
      std::uint32_t there = 0;
#pragma unroll
      for (std::uint32_t j = 0; j < kLines; ++j) {
        const int list = __ffs(static_cast<int>(__ballot_sync(kAll, behind > line + j))) - 1;
        const std::uint32_t begin = __shfl_sync(kAll, behind - lines, max(list, 0));
        const std::uint32_t i = (line + j - begin) * kWarp + lane;
        const std::uint32_t end = list < 0 ? 0 : __shfl_sync(kAll, count, list);  // The same list in all lanes.
        at[j] = std::uint64_t{first + static_cast<std::uint32_t>(max(list, 0))} * m.list_room() + i;
        there |= i < end ? 1u << j : 0;
        rows[j] = i < end ? __ldcg(far_rows + at[j]) : 0;
      }
#pragma unroll
      for (std::uint32_t j = 0; j < kLines; ++j)
        if ((there >> j & 1) != 0) m.far_rows[at[j]] = rows[j];
    }
  }
}

/// As tell(), by a warp of each block; the last one's sends all lists.
__device__ inline void tell_and_send(const ForwardMemory& m, const std::uint32_t* far_rows, std::uint32_t layer,
                                     const Work& work, Listed listed) {
  const bool first = detail::cluster_rank() == 0;
  Arrived all;
  if (threadIdx.x % kWarp == 0) {
    if (first) {
      m.near_counts[work.index] = listed.near;
      m.far_listed[work.index] = listed.far;
    } else {
      listed = {};
    }
    all = arrive(m, listed, 0, first && work.row.list != kNone ? work.row.asks : 0);
  }
  if (!__any_sync(kAll, all.wanted)) return;
  send_lists(m, far_rows);
  __syncwarp();
  if (threadIdx.x % kWarp == 0) ask(m, layer, all.choices);
}

}  // namespace sluice::gpu::forward
