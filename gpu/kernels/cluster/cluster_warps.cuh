#pragma once

#include <cstdint>

#include "gpu/kernels/cluster/cluster.hpp"

/// What kernels of k-means share that give each cluster, or each chunk of keys, a warp.
namespace sluice::gpu::k_means {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;

/// Whether an item's clusters have to be moved after this iteration.
__device__ __forceinline__ bool moves(const ClusterItem& item, std::uint32_t iteration) {
  return iteration < item.iterations && item.changed[iteration] != 0;
}

/// A grid with room for `things` of each item, `per_block` in a thread block.
inline dim3 blocks(std::uint64_t things, std::uint32_t per_block, const TaskArray<ClusterItem>& items) {
  return {static_cast<unsigned>((things + per_block - 1) / per_block), items.count, 1};
}

}  // namespace sluice::gpu::k_means
