#include "gpu/kernels/index/value_mean.hpp"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/index/value_mean.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

/// One warp per page: head_dim up to 256 is at most 32 units of 8 columns.
constexpr std::uint32_t kThreads = 32;

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    mean_values_kernel(const __grid_constant__ TaskArray<ValueMeanTask> tasks, PageLayout layout) {
  __shared__ ValueMeanTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  detail::mean_page<kType>(task.page, task.out, layout, threadIdx.x);
}

}  // namespace

void launch_mean_values(const TaskArray<ValueMeanTask>& tasks, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  auto* const kernel = layout.dtype == DType::bf16 ? mean_values_kernel<DType::bf16>
                       : layout.scaled()           ? mean_values_kernel<DType::fp8_e4m3>
                                                   : mean_values_kernel<DType::f16>;
  kernel<<<tasks.count, kThreads, 0, stream>>>(tasks, layout);
  check(cudaGetLastError(), "launch the kernel of mean values");
}

void load_mean_values_kernels() {
  load_kernel(mean_values_kernel<DType::f16>, "load the kernel of mean values for f16 pages");
  load_kernel(mean_values_kernel<DType::bf16>, "load the kernel of mean values for bf16 pages");
  load_kernel(mean_values_kernel<DType::fp8_e4m3>, "load the kernel of mean values for fp8 pages");
}

}  // namespace sluice::gpu
