#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;

/// One thread block per page, one warp per row at a time, one word of codes per lane.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    codes_kernel(const __grid_constant__ TaskArray<CodesTask> tasks, PageLayout pages) {
  const Int4Layout layout(pages);
  __shared__ CodesTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.rows; row += kThreads / kWarp) {
    const std::byte* const k = task.page + std::uint64_t{row} * layout.head_dim * detail::kElementBytes<kType>;
    if constexpr (detail::kScaled<kType>) {
      const float scale = reinterpret_cast<const float*>(task.page + pages.scales_offset())[2 * row];
      const auto key = [=](std::uint32_t channel) {
        return __fmul_rn(detail::widen_e4m3(std::to_integer<std::uint32_t>(k[channel])), scale);
      };
      detail::codes_of_row(key, task.out, row, layout);
    } else {
      detail::codes_of_row([k](std::uint32_t channel) { return detail::load_element<kType>(k + channel * 2); },
                           task.out, row, layout);
    }
  }
}

}  // namespace

void launch_make_codes(const TaskArray<CodesTask>& tasks, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  auto* const kernel = layout.dtype == DType::bf16 ? codes_kernel<DType::bf16>
                       : layout.scaled()           ? codes_kernel<DType::fp8_e4m3>
                                                   : codes_kernel<DType::f16>;
  kernel<<<tasks.count, kThreads, 0, stream>>>(tasks, layout);
  check(cudaGetLastError(), "launch the codes kernel");
}

void load_codes_kernels() {
  load_kernel(codes_kernel<DType::f16>, "load the codes kernel for f16 pages");
  load_kernel(codes_kernel<DType::bf16>, "load the codes kernel for bf16 pages");
  load_kernel(codes_kernel<DType::fp8_e4m3>, "load the codes kernel for fp8 pages");
}

}  // namespace sluice::gpu
