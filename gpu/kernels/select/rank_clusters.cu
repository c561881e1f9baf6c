// The order of clusters for each query head (Tactic, section 4.3): what their centroids score, each read once for the
// group; and then a sort, by one thread block for each head, which also says where in the list of tokens they begin.

#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/choose_clusters.cuh"
#include "gpu/kernels/select/top_k.cuh"
#include "gpu/tuning.hpp"

namespace sluice::gpu {
namespace {

using namespace choose_clusters;

constexpr std::uint32_t kScoreThreads = 256;
constexpr std::uint32_t kScoreWarps = kScoreThreads / kWarp;
constexpr std::uint32_t kRankThreads = 1024;
constexpr std::uint32_t kFew = 1;   ///< clusters of a thread, at most
constexpr std::uint32_t kSome = 4;  ///< likewise
constexpr std::uint32_t kMany = kMostClusters / kRankThreads;

/// blockIdx.y is the task; a warp takes one centroid after the other.
template <std::uint32_t kDim>
__global__ void __launch_bounds__(kScoreThreads)
    score_centroids_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks, std::uint32_t group) {
  constexpr std::uint32_t kOwn = kDim / kWarp;
  __shared__ float queries[kMaxGroup * kDim];
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.y];
  if (task.clusters == 0) return;
  for (std::uint32_t i = threadIdx.x; i < group * kDim; i += kScoreThreads) queries[i] = task.q[i];
  __syncthreads();
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint64_t stride = ClusterRoom::of(task).words();
  auto* const values = reinterpret_cast<float*>(task.scratch);
  for (std::uint32_t i = blockIdx.x * kScoreWarps + threadIdx.x / kWarp; i < task.clusters;
       i += gridDim.x * kScoreWarps) {
    float own[kOwn];
#pragma unroll
    for (std::uint32_t c = 0; c < kOwn; ++c) own[c] = task.centroids[std::uint64_t{i} * kDim + c * kWarp + lane];
    float mine = 0.f;  // Of head `lane`.
    for (std::uint32_t h = 0; h < group; ++h) {
      float sum = 0.f;
#pragma unroll
      for (std::uint32_t c = 0; c < kOwn; ++c) sum += own[c] * queries[h * kDim + c * kWarp + lane];
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
      if (lane == h) mine = sum;
    }
    if (lane < group) values[lane * stride + i] = mine;
  }
}

template <std::uint32_t kItems>
using Sort = cub::BlockRadixSort<std::uint32_t, kRankThreads, kItems, std::uint32_t>;
using Scan = cub::BlockScan<std::uint32_t, kRankThreads>;

union RankStorage {
  Sort<kFew>::TempStorage few;
  Sort<kSome>::TempStorage some;
  Sort<kMany>::TempStorage many;
  Scan::TempStorage scan;
};

/// The sort is stable, and what a thread has are neighbours: equal keys stay in the order of their indices.
template <std::uint32_t kItems>
__device__ void rank(const ChooseClustersTask& task, const HeadMemory& memory, typename Sort<kItems>::TempStorage& sort,
                     Scan::TempStorage& scan) {
  const std::uint32_t first = threadIdx.x * kItems;
  std::uint32_t keys[kItems];
  std::uint32_t clusters[kItems];
#pragma unroll
  for (std::uint32_t i = 0; i < kItems; ++i) {
    clusters[i] = first + i;
    // What there is not comes last, behind what is no number, whose key is the same.
    keys[i] = clusters[i] < task.clusters ? ~order_key(memory.values[clusters[i]]) : ~0u;
  }
  Sort<kItems>(sort).Sort(keys, clusters);
  __syncthreads();
  std::uint32_t sizes[kItems];
#pragma unroll
  for (std::uint32_t i = 0; i < kItems; ++i) {
    const std::uint32_t cluster = clusters[i];
    sizes[i] = cluster < task.clusters ? task.starts[cluster + 1] - task.starts[cluster] : 0;
  }
  Scan(scan).ExclusiveSum(sizes, sizes);
#pragma unroll
  for (std::uint32_t i = 0; i < kItems; ++i) {
    if (first + i >= task.clusters) continue;
    memory.order[first + i] = clusters[i];
    memory.begins[first + i] = sizes[i];
  }
  if (threadIdx.x == 0) memory.begins[task.clusters] = task.samples.tokens;
}

/// blockIdx.x is the query head, blockIdx.y the task.
__global__ void __launch_bounds__(kRankThreads)
    rank_clusters_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks) {
  extern __shared__ __align__(16) std::byte dynamic[];
  auto& storage = *reinterpret_cast<RankStorage*>(dynamic);
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.y];
  if (task.clusters == 0) return;
  const HeadMemory memory = memory_of(task, blockIdx.x);
  if (task.clusters <= kFew * kRankThreads) return rank<kFew>(task, memory, storage.few, storage.scan);
  if (task.clusters <= kSome * kRankThreads) return rank<kSome>(task, memory, storage.some, storage.scan);
  rank<kMany>(task, memory, storage.many, storage.scan);
}

}  // namespace

void launch_rank_clusters(const TaskArray<ChooseClustersTask>& tasks, std::uint32_t most_clusters,
                          const ChooseClustersShape& shape, cudaStream_t stream) {
  // Enough thread blocks to keep the memory busy, each with a few centroids at least, as it reads all queries first.
  const std::uint32_t useful = (most_clusters + 4 * kScoreWarps - 1) / (4 * kScoreWarps);
  const std::uint32_t wanted = 4 * shape.multiprocessors / tasks.count;
  const dim3 grid(std::max(1u, std::min(useful, wanted)), tasks.count);
  TunedHeadDims::with(shape.layout.head_dim, [&](auto head_dim) {
    OverlappingLaunch(grid, kScoreThreads, 0, stream)
        .run(score_centroids_kernel<head_dim.value>, "launch the kernel that scores centroids", tasks, shape.group);
  });
  OverlappingLaunch(dim3(shape.group, tasks.count), kRankThreads, sizeof(RankStorage), stream)
      .run(rank_clusters_kernel, "launch the kernel that ranks clusters", tasks);
}

void load_rank_clusters_kernels() {
  TunedHeadDims::each([&](std::uint32_t head_dim) {
    TunedHeadDims::with(head_dim, [&](auto dim) {
      load_kernel(score_centroids_kernel<dim.value>, "load the kernels that score centroids");
    });
  });
  load_kernel(rank_clusters_kernel, "load the kernel that ranks clusters", sizeof(RankStorage));
}

}  // namespace sluice::gpu
