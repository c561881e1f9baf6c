#pragma once

#include "gpu/kernels/forward/split.cuh"

namespace sluice::gpu::forward {

/// Lists the far rows of what is marked, the blocks' parts one after the other; returns what all have found. Near rows
/// are listed for an audit alone. All threads of the cluster, which a barrier of it follows before any block ends:
/// blocks read in each other's `own`.
__device__ inline Listed list_far(const ForwardMemory& m, const Work& work, Listed& own, Found& found,
                                  const Part& part) {
  const Listed mine = find_rows(m, work, found, part);
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
  const Listed all{.near = __reduce_add_sync(kAll, near), .far = __reduce_add_sync(kAll, far)};
  send_far(m, work, at.far - mine.far, at.far, all.far);
  return all;
}

}  // namespace sluice::gpu::forward
