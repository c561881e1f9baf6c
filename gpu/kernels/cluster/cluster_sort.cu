// K-means: a counting sort of the keys by their cluster. It is stable, so that the keys of a cluster are added up in
// their order.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/kernels/cluster/cluster_warps.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"

namespace sluice::gpu {
namespace {

using namespace k_means;
using detail::kAllLanes;

constexpr std::uint32_t kScanThreads = 1024;

__device__ __forceinline__ std::uint32_t inclusive_sum(std::uint32_t value) {
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) {
    const std::uint32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % kWarp >= step) value += below;
  }
  return value;
}

/// A warp per cluster turns what its chunks have into where theirs begin, counted from the cluster's first.
__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t iteration) {
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t cluster = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (cluster >= item.clusters || !moves(item, iteration)) return;
  std::uint32_t* const counts = item.offsets + std::uint64_t{cluster} * item.chunks;
  std::uint32_t before = 0;
  for (std::uint32_t first = 0; first < item.chunks; first += kWarp) {
    const std::uint32_t chunk = first + threadIdx.x % kWarp;
    const std::uint32_t keys = chunk < item.chunks ? counts[chunk] : 0;
    const std::uint32_t end = before + inclusive_sum(keys);
    if (chunk < item.chunks) counts[chunk] = end - keys;
    before = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  if (threadIdx.x % kWarp == 0) item.starts[cluster] = before;
}

/// A thread block per item turns the clusters' sizes into their beginnings.
__global__ void __launch_bounds__(kScanThreads)
    sum_clusters_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t iteration) {
  __shared__ std::uint32_t ends[kScanThreads / kWarp];
  const ClusterItem& item = items[blockIdx.x];
  if (!moves(item, iteration)) return;
  std::uint32_t before = 0;
  for (std::uint32_t first = 0; first < item.clusters; first += kScanThreads) {
    const std::uint32_t cluster = first + threadIdx.x;
    const std::uint32_t size = cluster < item.clusters ? item.starts[cluster] : 0;
    const std::uint32_t in_warp = inclusive_sum(size);
    if (threadIdx.x % kWarp == kWarp - 1) ends[threadIdx.x / kWarp] = in_warp;
    __syncthreads();
    const std::uint32_t sums = inclusive_sum(ends[threadIdx.x % kWarp]);
    const std::uint32_t warp = threadIdx.x / kWarp;
    const std::uint32_t up_to_warp = __shfl_sync(kAllLanes, sums, static_cast<int>(warp == 0 ? 0 : warp - 1));
    if (cluster < item.clusters) item.starts[cluster] = before + (warp == 0 ? 0 : up_to_warp) + in_warp - size;
    before += __shfl_sync(kAllLanes, sums, kWarp - 1);
    __syncthreads();  // `ends` is written again.
  }
  if (threadIdx.x == 0) item.starts[item.clusters] = before;
}

/// A warp per chunk lists its keys behind those of the chunks before it, 32 at a time.
__global__ void __launch_bounds__(kThreads)
    list_members_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t iteration) {
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t chunk = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (chunk >= item.chunks || !moves(item, iteration)) return;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t end = min((chunk + 1) * item.chunk_keys, item.count);
  for (std::uint32_t first = chunk * item.chunk_keys; first < end; first += kWarp) {
    const std::uint32_t key = first + lane;
    const std::uint32_t cluster = key < end ? item.assignment[key] : ~0u;
    const std::uint32_t peers = __match_any_sync(kAllLanes, cluster);
    const auto leader = static_cast<std::uint32_t>(__ffs(static_cast<int>(peers)) - 1);
    std::uint32_t at = 0;
    if (key < end && lane == leader) {
      std::uint32_t& offset = item.offsets[std::uint64_t{cluster} * item.chunks + chunk];
      at = item.starts[cluster] + offset;
      offset += static_cast<std::uint32_t>(__popc(peers));
    }
    at = __shfl_sync(kAllLanes, at, static_cast<int>(leader));
    if (key < end) item.members[at + static_cast<std::uint32_t>(__popc(peers & ((1u << lane) - 1)))] = key;
    __syncwarp();  // Another lane may lead the cluster's keys in the next turn.
  }
}

}  // namespace

void launch_cluster_sort(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, std::uint32_t iteration,
                         cudaStream_t stream) {
  sum_chunks_kernel<<<blocks(extent.clusters, kWarps, items), kThreads, 0, stream>>>(items, iteration);
  check(cudaGetLastError(), "launch the kernel that sums the keys of chunks");
  sum_clusters_kernel<<<items.count, kScanThreads, 0, stream>>>(items, iteration);
  check(cudaGetLastError(), "launch the kernel that sums the keys of clusters");
  list_members_kernel<<<blocks(extent.chunks, kWarps, items), kThreads, 0, stream>>>(items, iteration);
  check(cudaGetLastError(), "launch the kernel that lists the keys of clusters");
}

void load_cluster_sort_kernels() {
  const auto load = [](auto* kernel) { load_kernel(kernel, "load the kernels that sort keys by cluster"); };
  load(sum_chunks_kernel);
  load(sum_clusters_kernel);
  load(list_members_kernel);
}

}  // namespace sluice::gpu
