#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/select/score.hpp"

/// What the kernels that score pages are made of.
namespace sluice::gpu::scoring {

using detail::kUnit;

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 256;
/// Thread blocks that share a multiprocessor: 768 threads with 64 bytes of digests each in flight are 48 KiB, what
/// covers the latency of HBM at its full rate.
inline constexpr std::uint32_t kBlocksPerSm = 3;
/// Pages of one thread block at most, so that 32 heads fit into 48 KiB of shared memory.
template <std::uint32_t kHeadDim>
inline constexpr std::uint32_t kMaxSlice = kHeadDim <= 128 ? 192 : 96;

/// A row of head_dim elements is read by kLanes lanes, 16 bytes each; a thread block works on kBlockRows rows at once,
/// kRows for every set of lanes.
template <std::uint32_t kHeadDim, std::uint32_t kRows>
struct Tiling {
  /// A power of two, as sums go over them by halves: what is behind the row adds zeros.
  static constexpr std::uint32_t kLanes = std::bit_ceil(kHeadDim / kUnit);
  static constexpr std::uint32_t kBlockRows = kThreads / kLanes * kRows;
};

/// What a thread block keeps in dynamic shared memory, in this order; all parts are multiples of 16 bytes.
struct Staged {
  float* q;             ///< [group, head_dim], see stage_queries
  float* out;           ///< scores
  std::uint32_t* rows;  ///< [slice]: frames

  __device__ Staged(float* memory, std::uint32_t group, std::uint32_t head_dim, std::uint32_t slice)
      : q(memory), out(memory + group * head_dim), rows(reinterpret_cast<std::uint32_t*>(out + group * slice)) {}
  static std::uint32_t bytes(std::uint32_t group, std::uint32_t head_dim, std::uint32_t slice) {
    return (group * (head_dim + slice) + slice) * 4;
  }
};

/// Of every lane's eight elements first the first halves, then the second halves: so that lanes read 16 bytes next to
/// each other's.
template <std::uint32_t kHeadDim>
__device__ void stage_queries(const float* q, std::uint32_t group, float* staged) {
  for (std::uint32_t i = threadIdx.x; i < group * kHeadDim; i += kThreads) {
    const std::uint32_t c = i % kHeadDim;
    const std::uint32_t place = (c % kUnit) / 4 * (kHeadDim / 2) + c / kUnit * 4 + c % 4;
    staged[i - c + place] = q[i];
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

/// body.template operator()<kType, kHeadDim>() for the shape; the caller has refused all others.
template <class Body>
void for_shape(const ScoreShape& shape, const Body& body) {
  KernelHeadDims::with(shape.head_dim, [&](auto dim) {
    shape.dtype == DType::bf16 ? body.template operator()<DType::bf16, dim()>()
                               : body.template operator()<DType::f16, dim()>();
  });
}

/// Rows of a slice: all thread blocks fit on the GPU at once if the slice is not limited by shared memory.
inline std::uint32_t slice_for(std::uint64_t total, std::uint32_t block_rows, std::uint32_t most,
                               std::uint32_t multiprocessors) {
  const std::uint64_t even = div_up(total, std::uint64_t{multiprocessors} * kBlocksPerSm);
  return static_cast<std::uint32_t>(std::min(div_up(even, block_rows) * block_rows, std::uint64_t{most}));
}

}  // namespace sluice::gpu::scoring
