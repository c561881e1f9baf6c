#include <algorithm>
#include <bit>

#include "gpu/device/cuda_error.hpp"
#include "gpu/head_dims.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/select/score.hpp"

namespace sluice::gpu {
namespace {

using detail::kUnit;

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;
/// Thread blocks that share a multiprocessor: 768 threads with 64 bytes of digests each in flight are 48 KiB, what
/// covers the latency of HBM at its full rate.
constexpr std::uint32_t kBlocksPerSm = 3;
/// Pages (tokens) of one thread block at most, so that 32 heads fit into 48 KiB of shared memory.
template <std::uint32_t kHeadDim>
constexpr std::uint32_t kMaxSlice = kHeadDim <= 128 ? 192 : 96;

/// A row of head_dim elements is read by kLanes lanes, 16 bytes each; a thread block works on kBlockRows rows at once,
/// kRows for every set of lanes.
template <std::uint32_t kHeadDim, std::uint32_t kRows>
struct Tiling {
  /// A power of two, as sums go over them by halves: what is behind the row adds zeros.
  static constexpr std::uint32_t kLanes = std::bit_ceil(kHeadDim / kUnit);
  static constexpr std::uint32_t kBlockRows = kThreads / kLanes * kRows;
};
constexpr std::uint32_t kPagesAtOnce = 2;
constexpr std::uint32_t kTokensAtOnce = 4;

/// What a thread block keeps in dynamic shared memory, in this order; all parts are multiples of 16 bytes.
struct Staged {
  float* q;             ///< [group, head_dim], see stage_queries
  float* out;           ///< scores
  std::uint32_t* rows;  ///< [slice]: frames or rows

  __device__ Staged(float* memory, std::uint32_t group, std::uint32_t head_dim, std::uint32_t slice)
      : q(memory), out(memory + group * head_dim), rows(reinterpret_cast<std::uint32_t*>(out + group * slice)) {}
  static std::uint32_t bytes(std::uint32_t group, std::uint32_t head_dim, std::uint32_t slice) {
    return (group * (head_dim + slice) + slice) * 4;
  }
};

/// Of every lane's eight elements first the first halves, then the second halves: so that lanes read 16 bytes next to
/// each other's.
template <std::uint32_t kHeadDim>
__device__ void stage_queries(const float* q, std::uint32_t group, float scale, float* staged) {
  for (std::uint32_t i = threadIdx.x; i < group * kHeadDim; i += kThreads) {
    const std::uint32_t c = i % kHeadDim;
    const std::uint32_t place = (c % kUnit) / 4 * (kHeadDim / 2) + c / kUnit * 4 + c % 4;
    staged[i - c + place] = q[i] * scale;
  }
}

template <std::uint32_t kHeadDim>
__device__ __forceinline__ void load_query(const float* staged, std::uint32_t lane, float (&q)[kUnit]) {
  if constexpr (!std::has_single_bit(kHeadDim)) {
    if (lane >= kHeadDim / kUnit) {
#pragma unroll
      for (std::uint32_t c = 0; c < kUnit; ++c) q[c] = 0.f;
      return;
    }
  }
  const float4 a = reinterpret_cast<const float4*>(staged)[lane];
  const float4 b = reinterpret_cast<const float4*>(staged + kHeadDim / 2)[lane];
  q[0] = a.x, q[1] = a.y, q[2] = a.z, q[3] = a.w;
  q[4] = b.x, q[5] = b.y, q[6] = b.z, q[7] = b.w;
}

/// Sums of kCount values over kLanes lanes. Lane l of them gets the sum of value l / (kLanes / kCount): lanes give
/// away the half of the values that they are not going to hold, so that few shuffles do.
template <std::uint32_t kCount, std::uint32_t kLanes>
__device__ __forceinline__ float sum_over_lanes(float (&v)[kCount], std::uint32_t lane) {
  static_assert(kCount == 2 || kCount == 4);
  constexpr std::uint32_t kAll = 0xffff'ffffu;
  std::uint32_t step = kLanes / 2;
#pragma unroll
  for (std::uint32_t half = kCount / 2; half > 0; half /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (std::uint32_t i = 0; i < half; ++i) {
      const float given = upper ? v[i] : v[i + half];
      const float kept = upper ? v[i + half] : v[i];
      v[i] = kept + __shfl_xor_sync(kAll, given, static_cast<int>(step));
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) v[0] += __shfl_xor_sync(kAll, v[0], static_cast<int>(step));
  return v[0];
}

__device__ __forceinline__ uint4 load_unit_once(const std::byte* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

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
  stage_queries<kHeadDim>(task.q, group, 1.f, staged.q);
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

/// One thread block per task (blockIdx.y) and slice of its tokens (blockIdx.x).
template <DType kType, std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kThreads)
    score_tokens_kernel(const __grid_constant__ TaskArray<TokenRows> tasks, std::uint32_t group, std::uint32_t slice,
                        float scale) {
  using Tile = Tiling<kHeadDim, kTokensAtOnce>;
  extern __shared__ float4 memory[];
  __shared__ TokenRows task;
  if (threadIdx.x == 0) task = tasks[blockIdx.y];
  __syncthreads();
  const std::uint32_t begin = blockIdx.x * slice;
  if (begin >= task.count) return;
  const std::uint32_t count = min(slice, task.count - begin);
  const Staged staged(reinterpret_cast<float*>(memory), group, kHeadDim, slice);
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) staged.rows[i] = task.rows[begin + i];
  stage_queries<kHeadDim>(task.q, group, scale, staged.q);
  __syncthreads();

  const std::uint32_t lane = threadIdx.x % Tile::kLanes;
  const std::uint32_t first = threadIdx.x / Tile::kLanes * kTokensAtOnce;
  for (std::uint32_t at = 0; at < count; at += Tile::kBlockRows) {
    uint4 words[kTokensAtOnce];
    float k[kTokensAtOnce][kUnit];
#pragma unroll
    for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) {
      const std::uint64_t row = staged.rows[min(at + first + t, count - 1)];
      if (!std::has_single_bit(kHeadDim)) words[t] = {};
      if (std::has_single_bit(kHeadDim) || lane < kHeadDim / kUnit)
        words[t] = load_unit_once(task.base + row * (kHeadDim * 2) + lane * sizeof(uint4));
    }
#pragma unroll
    for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) detail::widen_unit<kType>(words[t], k[t]);
    const std::uint32_t token = at + first + lane / (Tile::kLanes / kTokensAtOnce);
    const bool writes = lane % (Tile::kLanes / kTokensAtOnce) == 0 && token < count;
    for (std::uint32_t head = 0; head < group; ++head) {
      float q[kUnit];
      float sums[kTokensAtOnce] = {};
      load_query<kHeadDim>(staged.q + head * kHeadDim, lane, q);
#pragma unroll
      for (std::uint32_t c = 0; c < kUnit; ++c) {
#pragma unroll
        for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) sums[t] = fmaf(q[c], k[t][c], sums[t]);
      }
      const float score = sum_over_lanes<kTokensAtOnce, Tile::kLanes>(sums, lane);
      if (writes) staged.out[token * group + head] = score;
    }
  }
  __syncthreads();
  float* const out = task.out + std::uint64_t{begin} * group;
  for (std::uint32_t i = threadIdx.x; i < count * group; i += kThreads) out[i] = staged.out[i];
}

/// body.template operator()<kType, kHeadDim>() for the shape; the caller has refused all others.
template <class Body>
void for_shape(const ScoreShape& shape, const Body& body) {
  KernelHeadDims::with(shape.head_dim, [&](auto dim) {
    shape.dtype == DType::bf16 ? body.template operator()<DType::bf16, dim()>()
                               : body.template operator()<DType::f16, dim()>();
  });
}

/// Rows of a slice: all thread blocks fit on the GPU at once if the slice is not limited by shared memory.
std::uint32_t slice_for(std::uint64_t total, std::uint32_t block_rows, std::uint32_t most,
                        std::uint32_t multiprocessors) {
  const std::uint64_t even = div_up(total, std::uint64_t{multiprocessors} * kBlocksPerSm);
  return static_cast<std::uint32_t>(std::min(div_up(even, block_rows) * block_rows, std::uint64_t{most}));
}

/// Of `total` pages, at most `longest` each.
void launch_score_pages(const TaskArray<ScorePagesTask>& tasks, std::uint64_t total, std::uint32_t longest,
                        const ScoreShape& shape, cudaStream_t stream) {
  if (total == 0) return;
  for_shape(shape, [&]<DType kType, std::uint32_t kHeadDim>() {
    const std::uint32_t slice = slice_for(
        total, Tiling<kHeadDim, kPagesAtOnce>::kBlockRows, kMaxSlice<kHeadDim>, shape.multiprocessors);
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

void launch_score_tokens(const TaskArray<TokenRows>& tasks, const ScoreShape& shape, cudaStream_t stream) {
  std::uint64_t total = 0;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < tasks.count; ++i) {
    total += tasks[i].count;
    longest = std::max(longest, tasks[i].count);
  }
  if (total == 0) return;
  for_shape(shape, [&]<DType kType, std::uint32_t kHeadDim>() {
    const std::uint32_t slice = slice_for(
        total, Tiling<kHeadDim, kTokensAtOnce>::kBlockRows, kMaxSlice<kHeadDim>, shape.multiprocessors);
    const dim3 grid(static_cast<std::uint32_t>(div_up(longest, slice)), tasks.count);
    const std::uint32_t shared = Staged::bytes(shape.group, kHeadDim, slice);
    score_tokens_kernel<kType, kHeadDim><<<grid, kThreads, shared, stream>>>(tasks, shape.group, slice, shape.scale);
  });
  check(cudaGetLastError(), "launch the score_tokens kernel");
}

void load_score_kernels() {
  cudaFuncAttributes attributes;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    KernelHeadDims::each([&](std::uint32_t head_dim) {
      for_shape({.dtype = dtype, .head_dim = head_dim}, [&]<DType kType, std::uint32_t kHeadDim>() {
        check(cudaFuncGetAttributes(&attributes, score_pages_kernel<kType, kHeadDim>), "load a score_pages kernel");
        check(cudaFuncGetAttributes(&attributes, score_tokens_kernel<kType, kHeadDim>), "load a score_tokens kernel");
      });
    });
  }
}

}  // namespace sluice::gpu
