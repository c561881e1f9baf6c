#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/select/score.cuh"

namespace sluice::gpu {
namespace {

using namespace scoring;

constexpr std::uint32_t kPagesAtOnce = 2;

/// One lane's share of a digest.
struct DigestWords {
  uint4 hi, lo;
};

/// The same, widened: hi, and the bits in which lo differs from it.
struct DigestUnit {
  float hi[kUnit];
  std::uint32_t flip[kUnit];
};

template <DType kType>
__device__ __forceinline__ void widen(const DigestWords& words, DigestUnit& unit) {
  float lo[kUnit];
  detail::widen_unit<kType>(words.hi, unit.hi);
  detail::widen_unit<kType>(words.lo, lo);
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) unit.flip[c] = __float_as_uint(unit.hi[c]) ^ __float_as_uint(lo[c]);
}

/// One lane's part of the scores of kPagesAtOnce pages with one head. Of q*hi and q*lo the larger is the one with hi
/// where q is positive and with lo where it is negative, as on the CPU: what is not taken may be infinite or NaN.
__device__ __forceinline__ void score_unit(const float (&q)[kUnit], const DigestUnit (&pages)[kPagesAtOnce],
                                           float (&sums)[kPagesAtOnce]) {
#pragma unroll
  for (std::uint32_t p = 0; p < kPagesAtOnce; ++p) sums[p] = 0.f;
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) {
    const auto negative = static_cast<std::uint32_t>(__float_as_int(q[c]) >> 31);
#pragma unroll
    for (std::uint32_t p = 0; p < kPagesAtOnce; ++p) {
      const float bound = __uint_as_float(__float_as_uint(pages[p].hi[c]) ^ (pages[p].flip[c] & negative));
      sums[p] = fmaf(q[c], bound, sums[p]);
    }
  }
}

/// One thread block per task (blockIdx.y) and slice of its pages (blockIdx.x).
template <DType kType, std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    score_pages_kernel(const __grid_constant__ TaskArray<ScorePagesTask> tasks, std::uint32_t group,
                       std::uint32_t slice) {
  using Tile = Tiling<kHeadDim, kPagesAtOnce>;
  constexpr std::uint64_t kDigestBytes = std::uint64_t{2} * kHeadDim * 2;
  extern __shared__ float4 memory[];
  __shared__ ScorePagesTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.y];
  __syncthreads();
  const std::uint32_t begin = blockIdx.x * slice;
  if (begin >= task.pages) return;
  const std::uint32_t count = min(slice, task.pages - begin);
  const Staged staged(reinterpret_cast<float*>(memory), group, kHeadDim, slice);
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) staged.rows[i] = task.frames[begin + i];
  stage_queries<kHeadDim>(task.q, group, staged.q);
  __syncthreads();

  const std::uint32_t lane = threadIdx.x % Tile::kLanes;
  const std::uint32_t first = threadIdx.x / Tile::kLanes * kPagesAtOnce;
  const std::byte* const digests = task.digests + lane * sizeof(uint4);
  const auto load = [&](std::uint32_t at, DigestWords(&words)[kPagesAtOnce]) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPagesAtOnce; ++p) {  // What is missing in the last turn repeats the last page.
      const std::byte* const from = digests + staged.rows[min(at + first + p, count - 1)] * kDigestBytes;
      if (!std::has_single_bit(kHeadDim)) words[p] = {};
      if (std::has_single_bit(kHeadDim) || lane < kHeadDim / kUnit)
        words[p] = {.hi = load_unit_once(from), .lo = load_unit_once(from + kHeadDim * 2)};
    }
  };
  DigestWords next[kPagesAtOnce];
  load(0, next);
  // All lanes take part in every turn, because they shuffle.
  for (std::uint32_t at = 0; at < count; at += Tile::kBlockRows) {
    DigestUnit pages[kPagesAtOnce];
#pragma unroll
    for (std::uint32_t p = 0; p < kPagesAtOnce; ++p) widen<kType>(next[p], pages[p]);
    if (at + Tile::kBlockRows < count) load(at + Tile::kBlockRows, next);
    const std::uint32_t page = at + first + lane / (Tile::kLanes / kPagesAtOnce);
    const bool writes = lane % (Tile::kLanes / kPagesAtOnce) == 0 && page < count;
    for (std::uint32_t head = 0; head < group; ++head) {
      float q[kUnit];
      float sums[kPagesAtOnce];
      load_query<kHeadDim>(staged.q + head * kHeadDim, lane, q);
      score_unit(q, pages, sums);
      const float score = sum_over_lanes<kPagesAtOnce, Tile::kLanes>(sums, lane);
      if (writes) staged.out[head * slice + page] = score;
    }
  }
  __syncthreads();
  for (std::uint32_t head = threadIdx.x / kWarp; head < group; head += kThreads / kWarp) {
    float* const out = task.out + std::uint64_t{head} * task.pages + begin;
    for (std::uint32_t p = threadIdx.x % kWarp; p < count; p += kWarp) out[p] = staged.out[head * slice + p];
  }
}

/// Of `total` pages, at most `longest` each.
void launch_score_pages(const TaskArray<ScorePagesTask>& tasks, std::uint64_t total, std::uint32_t longest,
                        const ScoreShape& shape, cudaStream_t stream) {
  if (total == 0) return;
  for_shape(shape, [&]<DType kType, std::uint32_t kHeadDim>() {
    const std::uint32_t slice =
        slice_for(total, Tiling<kHeadDim, kPagesAtOnce>::kBlockRows, kMaxSlice<kHeadDim>, shape.multiprocessors);
    const dim3 grid(static_cast<std::uint32_t>(div_up(longest, slice)), tasks.count);
    const std::uint32_t shared = Staged::bytes(shape.group, kHeadDim, slice);
    score_pages_kernel<kType, kHeadDim><<<grid, kThreads, shared, stream>>>(tasks, shape.group, slice);
  });
  check(cudaGetLastError(), "launch the score_pages kernel");
}

}  // namespace

void launch_score_pages(const TaskArray<ScorePagesTask>& tasks, const ScoreShape& shape, cudaStream_t stream) {
  std::uint64_t total = 0;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < tasks.count; ++i) {
    total += tasks[i].pages;
    longest = std::max(longest, tasks[i].pages);
  }
  launch_score_pages(tasks, total, longest, shape, stream);
}

void launch_score_pages(const ScorePagesTask* tasks, std::uint32_t count, std::uint32_t longest,
                        const ScoreShape& shape, cudaStream_t stream) {
  TaskArray<ScorePagesTask> array;
  array.queued = tasks;
  array.count = count;
  launch_score_pages(array, std::uint64_t{count} * longest, longest, shape, stream);
}

void load_score_kernels() {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    KernelHeadDims::each([&](std::uint32_t head_dim) {
      for_shape({.dtype = dtype, .head_dim = head_dim}, [&]<DType kType, std::uint32_t kHeadDim>() {
        load_kernel(score_pages_kernel<kType, kHeadDim>, "load a score_pages kernel");
      });
    });
  }
}

}  // namespace sluice::gpu
