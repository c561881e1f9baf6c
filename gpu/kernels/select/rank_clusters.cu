// The order of clusters for each query head (Tactic, section 4.3): what their centroids score, each read once for the
// group; and then a sort, by one thread block for each head, which also says where in the list of tokens they begin.
// Of more clusters than a block sorts several sort a run each, and one merges these.

#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/choose_clusters.cuh"
#include "gpu/kernels/select/sorted_run.cuh"
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
constexpr std::uint32_t kMany = 16;
constexpr std::uint32_t kRun = kMany * kRankThreads;  ///< clusters that a thread block sorts

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

/// Clusters from `begin` on that a thread block sorts: those of a thread, which are neighbours. The sort is stable:
/// equal keys stay in the order of their indices.
template <std::uint32_t kItems>
struct Run {
  std::uint32_t keys[kItems];
  std::uint32_t clusters[kItems];

  __device__ Run(const ChooseClustersTask& task, const HeadMemory& memory, std::uint32_t begin,
                 typename Sort<kItems>::TempStorage& sort) {
#pragma unroll
    for (std::uint32_t i = 0; i < kItems; ++i) {
      clusters[i] = begin + threadIdx.x * kItems + i;
      // What there is not comes last, behind what is no number, whose key is the same.
      keys[i] = clusters[i] < task.clusters ? ~order_key(memory.values[clusters[i]]) : ~0u;
    }
    Sort<kItems>(sort).Sort(keys, clusters);
    __syncthreads();
  }
};

[[nodiscard]] __device__ std::uint32_t size_of(const ChooseClustersTask& task, std::uint32_t cluster) {
  return task.starts[cluster + 1] - task.starts[cluster];
}

/// All clusters of a head.
template <std::uint32_t kItems>
__device__ void rank(const ChooseClustersTask& task, const HeadMemory& memory, typename Sort<kItems>::TempStorage& sort,
                     Scan::TempStorage& scan) {
  const Run<kItems> run(task, memory, 0, sort);
  const std::uint32_t first = threadIdx.x * kItems;
  std::uint32_t sizes[kItems];
#pragma unroll
  for (std::uint32_t i = 0; i < kItems; ++i)
    sizes[i] = run.clusters[i] < task.clusters ? size_of(task, run.clusters[i]) : 0;
  Scan(scan).ExclusiveSum(sizes, sizes);
#pragma unroll
  for (std::uint32_t i = 0; i < kItems; ++i) {
    if (first + i >= task.clusters) continue;
    memory.order[first + i] = run.clusters[i];
    memory.begins[first + i] = sizes[i];
  }
  if (threadIdx.x == 0) memory.begins[task.clusters] = task.samples.tokens;
}

/// What is sorted of a run, until it is merged: keys where the scores were, and clusters where their beginnings will
/// be.
struct Runs {
  std::uint32_t* keys;
  std::uint32_t* clusters;
  __device__ explicit Runs(const HeadMemory& memory)
      : keys(reinterpret_cast<std::uint32_t*>(memory.values)), clusters(memory.begins) {}
};

/// Some of a head's clusters, of which there are more.
__device__ void sort_run(const ChooseClustersTask& task, const HeadMemory& memory, std::uint32_t begin,
                         RankStorage& storage) {
  if (begin >= task.clusters) return;
  const Run<kMany> run(task, memory, begin, storage.many);
  const Runs runs(memory);
#pragma unroll
  for (std::uint32_t i = 0; i < kMany; ++i) {
    const std::uint32_t at = begin + threadIdx.x * kMany + i;
    if (at >= task.clusters) continue;
    runs.keys[at] = run.keys[i];
    runs.clusters[at] = run.clusters[i];
  }
}

/// blockIdx.x is the query head, blockIdx.y the task, blockIdx.z the run.
__global__ void __launch_bounds__(kRankThreads)
    rank_clusters_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks) {
  extern __shared__ __align__(16) std::byte dynamic[];
  auto& storage = *reinterpret_cast<RankStorage*>(dynamic);
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.y];
  if (task.clusters == 0) return;
  const HeadMemory memory = memory_of(task, blockIdx.x);
  if (task.clusters > kRun) return sort_run(task, memory, blockIdx.z * kRun, storage);
  if (blockIdx.z != 0) return;
  if (task.clusters <= kFew * kRankThreads) return rank<kFew>(task, memory, storage.few, storage.scan);
  if (task.clusters <= kSome * kRankThreads) return rank<kSome>(task, memory, storage.some, storage.scan);
  rank<kMany>(task, memory, storage.many, storage.scan);
}

/// blockIdx.x is the query head, blockIdx.y the task. Neighbours look for keys that are much alike, so that what a warp
/// reads of another run lies together.
__global__ void __launch_bounds__(kRankThreads)
    merge_clusters_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks) {
  __shared__ Scan::TempStorage scan;
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.y];
  if (task.clusters <= kRun) return;
  const HeadMemory memory = memory_of(task, blockIdx.x);
  const Runs runs(memory);
  for (std::uint32_t i = threadIdx.x; i < task.clusters; i += kRankThreads) {
    memory.order[sorted_run::place_of<kRun>(runs.keys, task.clusters, i)] = runs.clusters[i];
  }
  __syncthreads();
  std::uint32_t begins = 0;
  for (std::uint32_t base = 0; base < task.clusters; base += kSome * kRankThreads) {
    const std::uint32_t first = base + threadIdx.x * kSome;
    std::uint32_t sizes[kSome];
#pragma unroll
    for (std::uint32_t i = 0; i < kSome; ++i)
      sizes[i] = first + i < task.clusters ? size_of(task, memory.order[first + i]) : 0;
    std::uint32_t all = 0;
    Scan(scan).ExclusiveSum(sizes, sizes, all);
#pragma unroll
    for (std::uint32_t i = 0; i < kSome; ++i) {
      if (first + i < task.clusters) memory.begins[first + i] = begins + sizes[i];
    }
    begins += all;
    __syncthreads();  // The sums of the turn before have been read.
  }
  if (threadIdx.x == 0) memory.begins[task.clusters] = task.samples.tokens;
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
  const std::uint32_t runs = (most_clusters + kRun - 1) / kRun;
  OverlappingLaunch(dim3(shape.group, tasks.count, runs), kRankThreads, sizeof(RankStorage), stream)
      .run(rank_clusters_kernel, "launch the kernel that ranks clusters", tasks);
  if (runs == 1) return;
  OverlappingLaunch(dim3(shape.group, tasks.count), kRankThreads, 0, stream)
      .run(merge_clusters_kernel, "launch the kernel that merges runs of clusters", tasks);
}

void load_rank_clusters_kernels() {
  TunedHeadDims::each([&](std::uint32_t head_dim) {
    TunedHeadDims::with(head_dim, [&](auto dim) {
      load_kernel(score_centroids_kernel<dim.value>, "load the kernels that score centroids");
    });
  });
  load_kernel(rank_clusters_kernel, "load the kernel that ranks clusters", sizeof(RankStorage));
  load_kernel(merge_clusters_kernel, "load the kernel that merges runs of clusters");
}

}  // namespace sluice::gpu
