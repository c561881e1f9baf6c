#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;

/// One thread block per page, one warp per row at a time, one unit of codes per lane.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    codes_kernel(const __grid_constant__ TaskArray<CodesTask> tasks, PageLayout pages, CodeLayout layout) {
  __shared__ CodesTask task;
  __shared__ float staged[kThreads / kWarp][detail::kMostHeadDim];
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  detail::HeadLanes mean = {};
  if (task.mean != nullptr)
    detail::each_channel(layout.head_dim, [&](std::uint32_t i, std::uint32_t channel) { mean[i] = task.mean[channel]; });
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.rows; row += kThreads / kWarp)
    detail::codes_of_row(detail::PageKey<kType>(task.page, pages, row), mean, staged[threadIdx.x / kWarp], task.out,
                         row, layout);
}

}  // namespace

void launch_make_codes(const TaskArray<CodesTask>& tasks, const PageLayout& layout, std::uint32_t bits,
                       cudaStream_t stream) {
  if (tasks.count == 0) return;
  auto* const kernel = layout.dtype == DType::bf16 ? codes_kernel<DType::bf16>
                       : layout.scaled()           ? codes_kernel<DType::fp8_e4m3>
                                                   : codes_kernel<DType::f16>;
  kernel<<<tasks.count, kThreads, 0, stream>>>(tasks, layout, CodeLayout(layout, bits));
  check(cudaGetLastError(), "launch the codes kernel");
}

void load_codes_kernels() {
  load_kernel(codes_kernel<DType::f16>, "load the codes kernel for f16 pages");
  load_kernel(codes_kernel<DType::bf16>, "load the codes kernel for bf16 pages");
  load_kernel(codes_kernel<DType::fp8_e4m3>, "load the codes kernel for fp8 pages");
}

}  // namespace sluice::gpu
