// How far down the list of clusters each query head goes (Tactic, section 4.4): a few tokens of the list are estimated
// by their 4-bit copies, a curve is fitted to them, and the clusters that hold the share wanted are unfolded.

#include <algorithm>
#include <cmath>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/index/rotate.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/choose_clusters.cuh"

namespace sluice::gpu {
namespace {

using namespace choose_clusters;

constexpr std::uint32_t kSampleThreads = 256;
constexpr std::uint32_t kLanes = 8;  ///< of a token
constexpr std::uint32_t kSampleRows = kSampleThreads / kLanes;
constexpr std::uint32_t kFitThreads = 1024;
constexpr std::uint32_t kFitWarps = kFitThreads / kWarp;

/// The token at a position of the list.
__device__ __forceinline__ std::uint32_t token_at(const ChooseClustersTask& task, const HeadMemory& memory,
                                                  std::uint32_t position) {
  std::uint32_t low = 0;  // The last cluster that begins there or before it; empty ones come before it.
  std::uint32_t high = task.clusters;
  while (low + 1 < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (memory.begins[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return task.members[task.starts[memory.order[low]] + (position - memory.begins[low])];
}

/// Token `i` of those that are scored.
__device__ __forceinline__ std::uint32_t scored_token(const ChooseClustersTask& task, const HeadMemory& memory,
                                                      std::uint32_t i) {
  if (i < task.sinks) return i;
  if (i < task.anyway()) return task.recent + (i - task.sinks);
  return token_at(task, memory, task.samples.position(i - task.anyway()));
}

/// The first warp stages the query of head blockIdx.y.
template <std::uint32_t kDim>
__device__ void stage_query(const ChooseClustersTask& task, float (&query)[kDim], float& shift) {
  float values[kDim / 32];
  float along = 0.f;
#pragma unroll
  for (std::uint32_t i = 0; i < kDim / 32; ++i) {
    const std::uint32_t channel = i * 32 + threadIdx.x;
    values[i] = task.q[blockIdx.y * kDim + channel];
    if (task.mean != nullptr) along += values[i] * task.mean[channel];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) along += __shfl_xor_sync(kAll, along, step);
  detail::rotate(values, kDim);
#pragma unroll
  for (std::uint32_t i = 0; i < kDim / 32; ++i) query[i * 32 + threadIdx.x] = values[i];
  if (threadIdx.x == 0) shift = along;
}

/// blockIdx.y is the query head, blockIdx.z the task; kLanes lanes have a token.
template <std::uint32_t kDim>
__global__ void __launch_bounds__(kSampleThreads)
    score_samples_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks, CodeLayout layout, float scale,
                         float softcap) {
  constexpr std::uint32_t kWords = kDim / 8;
  __shared__ float query[kDim];  // Rotated.
  __shared__ float shift;        // Its product with the mean key.
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.z];
  if (task.clusters == 0) return;
  const HeadMemory memory = memory_of(task, blockIdx.y);
  if (threadIdx.x < 32) stage_query<kDim>(task, query, shift);
  __syncthreads();
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t all = task.scored();
  // All lanes of a warp take part in every turn, because they add up.
  for (std::uint32_t first = blockIdx.x * kSampleRows; first < all; first += gridDim.x * kSampleRows) {
    const std::uint32_t i = min(first + threadIdx.x / kLanes, all - 1);
    const std::uint32_t token = scored_token(task, memory, i);
    const std::uint32_t page = token / layout.page_tokens;
    const std::uint32_t row = token - page * layout.page_tokens;
    const std::byte* const copy = task.copies + task.frames[page] * layout.page_bytes();
    const auto* const codes = reinterpret_cast<const std::uint32_t*>(copy) + row * kWords;
    const std::uint32_t stored = reinterpret_cast<const std::uint32_t*>(copy + layout.params_offset())[row];
    float product = 0.f;
    float sum = 0.f;
#pragma unroll
    for (std::uint32_t w = lane; w < kWords; w += kLanes) {
      const std::uint32_t word = codes[w];
#pragma unroll
      for (std::uint32_t n = 0; n < 8; ++n) {
        const float q = query[w + n * kWords];
        product += static_cast<float>(word >> 4 * n & 15u) * q;
        sum += q;
      }
    }
#pragma unroll
    for (std::uint32_t step = kLanes / 2; step > 0; step /= 2) {
      product += __shfl_xor_sync(kAll, product, static_cast<int>(step));
      sum += __shfl_xor_sync(kAll, sum, static_cast<int>(step));
    }
    const float unit = detail::widen_f16(static_cast<std::uint16_t>(stored & 0xffffu));
    const float zero = detail::widen_f16(static_cast<std::uint16_t>(stored >> 16));
    float score = (unit * product + (zero * sum + shift)) * scale;
    if (softcap != 0.f) score = softcap * tanhf(score / softcap);
    // In the list, too, what is attended anyway would count twice.
    if (i >= task.anyway() && (token < task.sinks || token >= task.recent)) score = -INFINITY;
    if (lane == 0) memory.values[i] = score;
  }
}

using Reduce = cub::BlockReduce<double, kFitThreads>;
using Top = cub::BlockReduce<float, kFitThreads>;
using Scan = cub::BlockScan<double, kFitThreads>;

struct FitShared {
  union {
    Reduce::TempStorage reduce;
    Top::TempStorage top;
    Scan::TempStorage scan;
  };
  double value;
  float most;
  FittedCurve curve;
  std::uint32_t found;
};

/// As the templates of curve_fit.hpp are for the host, too.
struct Log {
  __host__ __device__ double operator()(double x) const { return ::log(x); }
};

/// One query head of a task, by a thread block.
class Fit {
 public:
  __device__ Fit(FitShared& s, const ChooseClustersTask& task, const HeadMemory& memory)
      : s_(s), task_(task), memory_(memory) {}

  /// How many tokens of the list are kept, in all threads.
  [[nodiscard]] __device__ std::uint32_t budget() {
    const FitSamples& samples = task_.samples;
    find_top();
    if (!isfinite(top_) || task_.mass >= 1.f) return samples.tokens;
    const std::uint32_t first = task_.anyway();
    const std::uint32_t near_at = first + samples.head.size();
    const double anyway = sum(0, first);
    const double head = sum(first, samples.head.size());
    const double near = sum(near_at, samples.near.size()) / samples.near.size();
    const double far = sum(near_at + samples.near.size(), samples.far.size()) / samples.far.size();
    // Logarithms of doubles take long; what is the same for all threads one finds out.
    if (threadIdx.x == 0) s_.curve = curve_through(samples.near, near, samples.far, far, Log{});
    __syncthreads();
    const FittedTail tail(s_.curve, samples.head.size(), samples.tokens, Log{});
    const double all = head + tail.mass(samples.tokens) + anyway;
    if (!(all > 0.0)) return samples.tokens;
    const double wanted = static_cast<double>(task_.mass) * all - anyway;  // Of the list.
    if (anyway > 0.0 && wanted <= 0.0) return 0;
    if (head >= wanted) return in_head(first, wanted);
    return in_tail(tail, wanted - head);
  }

 private:
  __device__ void find_top() {
    float top = -INFINITY;
    for (std::uint32_t i = threadIdx.x; i < task_.scored(); i += kFitThreads) {
      const float score = memory_.values[i];
      top = score > top ? score : top;  // Not if NaN.
    }
    const auto larger = [](float a, float b) { return a > b ? a : b; };
    top = Top(s_.top).Reduce(top, larger);
    if (threadIdx.x == 0) s_.most = top;
    __syncthreads();
    top_ = s_.most;
  }
  [[nodiscard]] __device__ double weight(std::uint32_t i) const {
    const float score = memory_.values[i];
    return score == score ? static_cast<double>(expf(score - top_)) : 0.0;
  }
  [[nodiscard]] __device__ double sum(std::uint32_t begin, std::uint32_t count) {
    double own = 0.0;
    for (std::uint32_t i = threadIdx.x; i < count; i += kFitThreads) own += weight(begin + i);
    own = Reduce(s_.reduce).Sum(own);
    if (threadIdx.x == 0) s_.value = own;
    __syncthreads();
    const double all = s_.value;
    __syncthreads();  // It is written again.
    return all;
  }

  /// The head, whose weights begin at value `first`, has what is wanted.
  [[nodiscard]] __device__ std::uint32_t in_head(std::uint32_t first, double wanted) {
    const std::uint32_t count = task_.samples.head.size();
    if (threadIdx.x == 0) s_.found = count;
    double before = 0.0;
    for (std::uint32_t base = 0; base < count; base += kFitThreads) {
      const std::uint32_t i = base + threadIdx.x;
      double upto = 0.0;
      double all = 0.0;
      Scan(s_.scan).InclusiveSum(i < count ? weight(first + i) : 0.0, upto, all);
      __syncthreads();
      const bool reached = i < count && before + upto >= wanted;
      if (reached) atomicMin(&s_.found, i + 1);
      if (__syncthreads_or(reached ? 1 : 0) != 0) break;
      before += all;
    }
    return s_.found;
  }

  /// The first position behind the head up to which the curve has what is wanted; as many probes as threads at a time.
  [[nodiscard]] __device__ std::uint32_t in_tail(const FittedTail<Log>& tail, double wanted) const {
    std::uint32_t low = task_.samples.head.size() + 1;
    std::uint32_t high = task_.samples.tokens;
    while (low < high) {
      const std::uint64_t span = high - low;
      const auto probe = [&](std::uint32_t i) { return low + static_cast<std::uint32_t>(span * i / kFitThreads); };
      const bool short_of = tail.mass(probe(threadIdx.x)) < wanted;
      const auto missing = static_cast<std::uint32_t>(__syncthreads_count(short_of ? 1 : 0));
      if (missing == 0) return low;
      const std::uint32_t last = probe(missing - 1);
      if (missing < kFitThreads) high = probe(missing);
      low = last + 1;
    }
    return high;
  }

  FitShared& s_;
  const ChooseClustersTask& task_;
  HeadMemory memory_;
  float top_ = 0.f;
};

/// The first `budget` tokens of the list as bits.
__device__ void unfold(const ChooseClustersTask& task, const HeadMemory& memory, std::uint32_t budget,
                       std::uint32_t* mask) {
  for (std::uint32_t i = threadIdx.x; i < (task.tokens + 31) / 32; i += kFitThreads) mask[i] = 0;
  __syncthreads();
  for (std::uint32_t i = threadIdx.x / kWarp; i < task.clusters; i += kFitWarps) {
    const std::uint32_t begin = memory.begins[i];
    if (begin >= budget) break;
    const std::uint32_t end = min(memory.begins[i + 1], budget);
    const std::uint32_t* const members = task.members + task.starts[memory.order[i]];
    for (std::uint32_t m = threadIdx.x % kWarp; m < end - begin; m += kWarp)
      atomicOr(mask + members[m] / 32, 1u << members[m] % 32);
  }
}

/// blockIdx.x is the query head, blockIdx.y the task.
__global__ void __launch_bounds__(kFitThreads)
    fit_clusters_kernel(const __grid_constant__ TaskArray<ChooseClustersTask> tasks) {
  __shared__ FitShared s;
  detail::wait_for_kernel_before();
  const ChooseClustersTask task = tasks[blockIdx.y];
  if (task.clusters == 0) return;
  const HeadMemory memory = memory_of(task, blockIdx.x);
  const std::uint32_t budget = Fit(s, task, memory).budget();
  if (task.counts != nullptr && threadIdx.x == 0) task.counts[blockIdx.x] = budget;
  unfold(task, memory, budget, task.masks + blockIdx.x * task.mask_words);
}

}  // namespace

void launch_fit_clusters(const TaskArray<ChooseClustersTask>& tasks, const ChooseClustersShape& shape,
                         cudaStream_t stream) {
  // A thread block has a few turns where contexts are long: each reads the query first.
  constexpr std::uint32_t kMostBlocks = 64;
  const std::uint32_t heads = shape.group * tasks.count;
  const std::uint32_t blocks = std::clamp(8 * shape.multiprocessors / heads, 1u, kMostBlocks);
  TunedHeadDims::with(shape.layout.head_dim, [&](auto head_dim) {
    OverlappingLaunch(dim3(blocks, shape.group, tasks.count), kSampleThreads, 0, stream)
        .run(score_samples_kernel<head_dim.value>, "launch the kernel that samples clusters", tasks, shape.layout,
             shape.scale, shape.softcap);
  });
  OverlappingLaunch(dim3(shape.group, tasks.count), kFitThreads, 0, stream)
      .run(fit_clusters_kernel, "launch the kernel that fits a curve to clusters", tasks);
}

void launch_choose_clusters(const TaskArray<ChooseClustersTask>& tasks, std::uint32_t most_clusters,
                            const ChooseClustersShape& shape, cudaStream_t stream) {
  if (tasks.count == 0 || most_clusters == 0) return;
  launch_rank_clusters(tasks, most_clusters, shape, stream);
  launch_fit_clusters(tasks, shape, stream);
}

void load_fit_clusters_kernels() {
  TunedHeadDims::each([&](std::uint32_t head_dim) {
    TunedHeadDims::with(head_dim, [&](auto dim) {
      load_kernel(score_samples_kernel<dim.value>, "load the kernels that sample clusters");
    });
  });
  load_kernel(fit_clusters_kernel, "load the kernel that fits a curve to clusters");
}

void load_choose_clusters_kernels() {
  load_rank_clusters_kernels();
  load_fit_clusters_kernels();
}

}  // namespace sluice::gpu
