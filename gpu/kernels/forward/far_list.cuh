#pragma once

#include "gpu/kernels/forward/split.cuh"

namespace sluice::gpu::forward {

/// Far rows that a block has found, in shared memory.
struct LinkRows {
  bool taken;           ///< the blocks attend the list's far rows, and the CPU is told of none
  std::uint32_t count;  ///< then: those of this block
  std::uint32_t rows[kMostLinkRows];
  float corrections[kMostLinkRows];  ///< of rows that draw
};

/// Lists the far rows of what is marked, the blocks' parts one after the other; returns what all have found. If these
/// are `link_rows` or fewer, and no block has more than it has room for, all blocks take theirs, in `few`. Near rows
/// are listed for an audit alone. All threads of the cluster, which a barrier of it follows before any block ends:
/// blocks read in each other's `own`.
__device__ inline Listed list_far(const ForwardMemory& m, const Work& work, std::uint32_t link_rows, Listed& own,
                                  LinkRows& few, Found& found, const Part& part) {
  const Listed mine = find_rows(m, work, found, part);
  if (threadIdx.x == 0) own = mine;
  detail::cluster_sync_own();
  const std::uint32_t b = threadIdx.x % kWarp;
  const bool there = b < part.blocks();
  const std::uint32_t near = there ? detail::load_in_cluster(detail::address_in(&own.near, b)) : 0;
  const std::uint32_t far = there ? detail::load_in_cluster(detail::address_in(&own.far, b)) : 0;
  const bool before = b < part.rank();
  Listed at{.near = __reduce_add_sync(kAll, before ? near : 0), .far = __reduce_add_sync(kAll, before ? far : 0)};
  const Listed all{.near = __reduce_add_sync(kAll, near), .far = __reduce_add_sync(kAll, far)};
  const bool taken = all.far <= link_rows && __reduce_max_sync(kAll, far) <= kMostLinkRows;
  const std::uint32_t first_far = at.far;
  if (threadIdx.x == 0) {
    few.taken = taken;
    few.count = taken ? mine.far : 0;
  }
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    if (part.count() > found.turn()) found.find(m, work, base);  // Else it is there still.
    found.for_each([&](std::uint32_t entry, bool is_one, const Sums& sums, std::uint32_t i) {
      const bool is_near = (entry & kNearBit) != 0;
      if (is_one && !is_near) {
        const std::uint32_t to = at.far + (sums.before >> 16);
        work.far_rows[to] = entry;  // Whoever attends them: they may come near, and an audit wants to know.
        if (taken) few.rows[to - first_far] = entry;
        if (found.corrected()) work.far_corrections[to] = found.correction(i);
        if (taken && found.corrected()) few.corrections[to - first_far] = found.correction(i);
      }
      if (is_near && m.bucket.audit)
        work.near_rows[at.near + (sums.before & 0xffffu)] = m.near_entry(work.plane, entry & ~kNearBit);
      at.add(sums);
    });
  }
  if (taken) {
    __syncthreads();
  } else {
    send_far(m, work, first_far, at.far, all.far);
  }
  return all;
}

}  // namespace sluice::gpu::forward
