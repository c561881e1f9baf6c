#pragma once

#include <cstdint>

/// Four results of attention that a thread has at once.
namespace sluice::gpu::detail {

/// The caller's memory need not be aligned.
__device__ inline void store4(float* to, float4 value) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<float4*>(to) = value;
  } else {
    to[0] = value.x;
    to[1] = value.y;
    to[2] = value.z;
    to[3] = value.w;
  }
}

__device__ inline void add_scaled(float4& sum, float weight, const float4& value) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

}  // namespace sluice::gpu::detail
