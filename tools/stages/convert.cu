#include <algorithm>
#include <cstdint>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "tools/stages/convert.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

/// Threads of a block.
constexpr std::uint32_t kThreads = 256;
/// Thread blocks per tensor; longer tensors loop.
constexpr std::uint64_t kMaxBlocks = 512;

std::uint64_t elements_of(const TensorView& in) noexcept { return std::uint64_t{in.tokens} * in.heads * in.head_dim; }

/// Thread blocks for tensors of up to `elements`; at least one.
std::uint32_t convert_blocks(std::uint64_t elements) noexcept {
  const std::uint64_t blocks = (elements / detail::kUnit + kThreads - 1) / kThreads;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks, 1, kMaxBlocks));
}

/// Sixteen-byte accesses at both ends.
__device__ bool by_units(const ToF32Task& task) {
  const std::uint64_t strides = (task.in.token_stride | task.in.head_stride) * bytes_of(task.in.dtype);
  const auto addresses = reinterpret_cast<std::uintptr_t>(task.in.data) | reinterpret_cast<std::uintptr_t>(task.out);
  return task.in.head_dim % detail::kUnit == 0 && ((strides | addresses) & 15) == 0;
}

/// kWidth consecutive elements per thread and turn: a unit where everything is aligned, else 1. For all threads of the
/// block, which is number `block` of `blocks` that share the tensor.
template <DType kType, std::uint32_t kWidth>
__device__ void convert(const TensorView& in, float* out, std::uint32_t block, std::uint32_t blocks) {
  const std::uint64_t per_row = in.head_dim / kWidth;
  const std::uint64_t units = std::uint64_t{in.tokens} * in.heads * per_row;
  const std::uint64_t step = std::uint64_t{blocks} * kThreads;
  for (std::uint64_t i = std::uint64_t{block} * kThreads + threadIdx.x; i < units; i += step) {
    const std::uint64_t row = i / per_row;
    const std::uint64_t at = row / in.heads * in.token_stride + row % in.heads * in.head_stride + i % per_row * kWidth;
    const std::byte* const from = in.data + at * detail::kElementBytes<kType>;
    if constexpr (kWidth == detail::kUnit) {
      float values[detail::kUnit];
      detail::load_unit<kType>(from, values);
      detail::store_unit<DType::f32>(reinterpret_cast<std::byte*>(out + i * detail::kUnit), values);
    } else {
      out[i] = detail::load_element<kType>(from);
    }
  }
}

template <DType kType>
__device__ void convert(const ToF32Task& task, std::uint32_t block, std::uint32_t blocks) {
  if (by_units(task)) {
    convert<kType, detail::kUnit>(task.in, task.out, block, blocks);
  } else {
    convert<kType, 1>(task.in, task.out, block, blocks);
  }
}

__device__ void convert(const ToF32Task& task, std::uint32_t block, std::uint32_t blocks) {
  switch (task.in.dtype) {
    case DType::f32: return convert<DType::f32>(task, block, blocks);
    case DType::f16: return convert<DType::f16>(task, block, blocks);
    case DType::bf16: return convert<DType::bf16>(task, block, blocks);
    case DType::fp8_e4m3: break;  // No tensor has it.
  }
}

/// blockIdx.y is the tensor.
__global__ void __launch_bounds__(kThreads) to_f32_kernel(const __grid_constant__ TaskArray<ToF32Task> tasks) {
  const ToF32Task task = tasks[blockIdx.y];
  convert(task, blockIdx.x, gridDim.x);
}

}  // namespace

void launch_to_f32(const TaskArray<ToF32Task>& tasks, cudaStream_t stream) {
  std::uint64_t longest = 0;
  for (std::uint32_t i = 0; i < tasks.count; ++i) longest = std::max(longest, elements_of(tasks[i].in));
  if (longest == 0) return;
  const dim3 grid(convert_blocks(longest), tasks.count);
  to_f32_kernel<<<grid, kThreads, 0, stream>>>(tasks);
  check(cudaGetLastError(), "launch the to_f32 kernel");
}

void load_convert_kernels() { load_kernel(to_f32_kernel, "load the to_f32 kernel"); }

}  // namespace sluice::tools
