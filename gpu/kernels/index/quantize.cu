#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/index/quantize.cuh"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;
/// One thread block per page, one warp per row at a time, one word of codes per lane.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ TaskArray<QuantizeTask> tasks, Int4Layout layout) {
  __shared__ QuantizeTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.rows; row += kThreads / kWarp) {
    const std::byte* const k = task.page + std::uint64_t{row} * layout.head_dim * 2;
    detail::quantize_row([k](std::uint32_t channel) { return detail::load_element<kType>(k + channel * 2); }, task.out,
                         row, layout);
  }
}

}  // namespace

void launch_quantize(const TaskArray<QuantizeTask>& tasks, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  const Int4Layout copy(layout);
  if (layout.dtype == DType::bf16) {
    quantize_kernel<DType::bf16><<<tasks.count, kThreads, 0, stream>>>(tasks, copy);
  } else {
    quantize_kernel<DType::f16><<<tasks.count, kThreads, 0, stream>>>(tasks, copy);
  }
  check(cudaGetLastError(), "launch the quantize kernel");
}

void load_quantize_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, quantize_kernel<DType::f16>), "load the quantize kernel for f16 pages");
  check(cudaFuncGetAttributes(&attributes, quantize_kernel<DType::bf16>), "load the quantize kernel for bf16 pages");
}

}  // namespace sluice::gpu
