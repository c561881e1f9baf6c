#pragma once

#include <cstdint>

#include "gpu/kernels/select/top_k.hpp"
#include "sluice/step/order_key.hpp"

/// What the kernels of top-k have in common.
namespace sluice::gpu::top_k {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 1024;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
inline constexpr std::uint32_t kAll = 0xffff'ffffu;

__device__ __forceinline__ std::uint32_t inclusive_sum(std::uint32_t value) {
  const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) {
    const std::uint32_t below = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

/// Sum of totals[w] over the warps before this one.
__device__ __forceinline__ std::uint32_t sum_before(const std::uint32_t (&totals)[kWarps]) {
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t sums = inclusive_sum(totals[threadIdx.x % kWarp]);
  const std::uint32_t before = __shfl_sync(kAll, sums, static_cast<int>(warp + kWarp - 1) % static_cast<int>(kWarp));
  return warp == 0 ? 0 : before;
}

}  // namespace sluice::gpu::top_k
