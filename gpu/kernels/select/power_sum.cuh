#pragma once

#include <cfloat>
#include <cstdint>

#include "gpu/kernels/mma.cuh"

namespace sluice::gpu::detail {

/// A sum of powers of 2, divided by that of `top`.
struct PowerSum {
  float top = -INFINITY;
  float mass = 0.f;

  /// Adds those of `x`, of which NaN and -infinity are none.
  template <std::uint32_t kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
    float each[kCount];
    float most = top;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      each[i] = fmaxf(x[i], -INFINITY);
      most = fmaxf(most, each[i]);
    }
    const float base = fmaxf(most, -FLT_MAX);  // Of nothing, too, the difference is a number.
    mass *= exp2_fast(top - base);
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) mass += exp2_fast(each[i] - base);
    top = most;
  }
  /// Adds another one.
  __device__ __forceinline__ void add_sum(const PowerSum& other) {
    const float most = fmaxf(top, other.top);
    const float base = fmaxf(most, -FLT_MAX);
    mass = mass * exp2_fast(top - base) + other.mass * exp2_fast(other.top - base);
    top = most;
  }
  /// Adds that of the lane whose number differs in a bit.
  __device__ __forceinline__ void add_lane(std::uint32_t bit) {
    add_sum({__shfl_xor_sync(kAllLanes, top, bit), __shfl_xor_sync(kAllLanes, mass, bit)});
  }
  /// Adds those of all other lanes; in each of them.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll 1
    for (std::uint32_t bit = 1; bit < 32; bit *= 2) add_lane(bit);
  }
};

/// The power of 2 that a score weighs as, soft-capped as attention does it; of one that is not there, -infinity, none.
[[nodiscard]] __device__ __forceinline__ float exponent_of(float score, float softcap) {
  const float x = kLog2E * (softcap > 0.f ? softcap * tanh_fast(__fdividef(score, softcap)) : score);
  return softcap > 0.f && score == -INFINITY ? score : x;
}

}  // namespace sluice::gpu::detail
