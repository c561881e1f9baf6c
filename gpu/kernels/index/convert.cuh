#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/kernels/elements.cuh"
#include "sluice/backend.hpp"

/// The body of to_f32, for kernels that do it beside something else.
namespace sluice::gpu::detail {

/// Threads of a block.
inline constexpr std::uint32_t kConvertThreads = 256;
/// Thread blocks per tensor; longer tensors loop.
inline constexpr std::uint64_t kMaxConvertBlocks = 512;

[[nodiscard]] inline std::uint64_t elements_of(const TensorView& in) noexcept {
  return std::uint64_t{in.tokens} * in.heads * in.head_dim;
}

/// Thread blocks for tensors of up to `elements`; at least one.
[[nodiscard]] inline std::uint32_t convert_blocks(std::uint64_t elements) noexcept {
  const std::uint64_t blocks = (elements / kUnit + kConvertThreads - 1) / kConvertThreads;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks, 1, kMaxConvertBlocks));
}

/// Sixteen-byte accesses at both ends.
__device__ inline bool by_units(const ToF32Task& task) {
  const std::uint64_t strides = (task.in.token_stride | task.in.head_stride) * bytes_of(task.in.dtype);
  const auto addresses = reinterpret_cast<std::uintptr_t>(task.in.data) | reinterpret_cast<std::uintptr_t>(task.out);
  return task.in.head_dim % kUnit == 0 && ((strides | addresses) & 15) == 0;
}

/// kWidth consecutive elements per thread and turn: a unit where everything is aligned, else 1. For all threads of the
/// block, which is number `block` of `blocks` that share the tensor.
template <DType kType, std::uint32_t kWidth>
__device__ void convert(const TensorView& in, float* out, std::uint32_t block, std::uint32_t blocks) {
  const std::uint64_t per_row = in.head_dim / kWidth;
  const std::uint64_t units = std::uint64_t{in.tokens} * in.heads * per_row;
  const std::uint64_t step = std::uint64_t{blocks} * kConvertThreads;
  for (std::uint64_t i = std::uint64_t{block} * kConvertThreads + threadIdx.x; i < units; i += step) {
    const std::uint64_t row = i / per_row;
    const std::uint64_t at = row / in.heads * in.token_stride + row % in.heads * in.head_stride + i % per_row * kWidth;
    const std::byte* const from = in.data + at * kElementBytes<kType>;
    if constexpr (kWidth == kUnit) {
      float values[kUnit];
      load_unit<kType>(from, values);
      store_unit<DType::f32>(reinterpret_cast<std::byte*>(out + i * kUnit), values);
    } else {
      out[i] = load_element<kType>(from);
    }
  }
}

template <DType kType>
__device__ void convert(const ToF32Task& task, std::uint32_t block, std::uint32_t blocks) {
  if (by_units(task)) {
    convert<kType, kUnit>(task.in, task.out, block, blocks);
  } else {
    convert<kType, 1>(task.in, task.out, block, blocks);
  }
}

__device__ inline void convert(const ToF32Task& task, std::uint32_t block, std::uint32_t blocks) {
  switch (task.in.dtype) {
    case DType::f32: return convert<DType::f32>(task, block, blocks);
    case DType::f16: return convert<DType::f16>(task, block, blocks);
    case DType::bf16: return convert<DType::bf16>(task, block, blocks);
  }
}

}  // namespace sluice::gpu::detail
