#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/index/convert.cuh"
#include "gpu/kernels/index/convert.hpp"

namespace sluice::gpu {
namespace {

/// blockIdx.y is the tensor.
__global__ void __launch_bounds__(detail::kConvertThreads)
    to_f32_kernel(const __grid_constant__ TaskArray<ToF32Task> tasks) {
  const ToF32Task task = tasks[blockIdx.y];
  detail::convert(task, blockIdx.x, gridDim.x);
}

}  // namespace

void launch_to_f32(const TaskArray<ToF32Task>& tasks, cudaStream_t stream) {
  std::uint64_t longest = 0;
  for (std::uint32_t i = 0; i < tasks.count; ++i) longest = std::max(longest, detail::elements_of(tasks[i].in));
  if (longest == 0) return;
  const dim3 grid(detail::convert_blocks(longest), tasks.count);
  to_f32_kernel<<<grid, detail::kConvertThreads, 0, stream>>>(tasks);
  check(cudaGetLastError(), "launch the to_f32 kernel");
}

void load_convert_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, to_f32_kernel), "load the to_f32 kernel");
}

}  // namespace sluice::gpu
