#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sluice/step/int4.hpp"

/// The Hadamard rotation of a head, by a warp; see CodeLayout. The same operations in the same order as on the CPU.
namespace sluice::gpu::detail {

/// A lane has channels i * 32 + lane, of which the first head_dim / 32 are there; kCount of them at most.
template <std::uint32_t kCount>
__device__ __forceinline__ void rotate(float (&x)[kCount], std::uint32_t head_dim) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t block = rotation_block(head_dim);
#pragma unroll
  for (std::uint32_t apart = 1; apart < 32; apart *= 2) {
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      if (i * 32 >= head_dim) break;
      const float other = __shfl_xor_sync(0xffff'ffffu, x[i], static_cast<int>(apart));
      x[i] = (lane & apart) != 0 ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (std::uint32_t apart = 1; apart < kCount; apart *= 2) {
    if (apart * 32 >= block) break;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      if ((i & apart) != 0 || i + apart >= kCount) continue;
      const float a = x[i];
      const float b = x[i + apart];
      x[i] = __fadd_rn(a, b);
      x[i + apart] = __fsub_rn(a, b);
    }
  }
  const float scale = rotation_scale(block);
#pragma unroll
  for (std::uint32_t i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], scale);
}

}  // namespace sluice::gpu::detail
