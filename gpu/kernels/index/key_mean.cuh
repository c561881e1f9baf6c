#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// The mean key of a sequence, see CodeLayout, an element at a time: as on the CPU, bit by bit.
namespace sluice::gpu::detail {

__device__ __forceinline__ float finite_or_none(float x) { return fabsf(x) <= 3.402823466e38f ? x : 0.f; }
/// Of the rows before, and one more.
__device__ __forceinline__ float add_key(float sum, float key) { return __fadd_rn(sum, finite_or_none(key)); }
__device__ __forceinline__ float mean_of_keys(float sum, std::uint32_t page_tokens) {
  return finite_or_none(__fmul_rn(sum, __fdiv_rn(1.f, static_cast<float>(page_tokens))));
}

}  // namespace sluice::gpu::detail
