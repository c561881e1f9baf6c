#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/index/digest.cuh"
#include "gpu/kernels/index/digest.hpp"
#include "gpu/kernels/load.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::gpu {
namespace {

/// One warp per page: head_dim up to 256 is at most 32 units of 8 columns.
constexpr std::uint32_t kThreads = 32;

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    digest_kernel(const __grid_constant__ TaskArray<DigestTask> tasks, DigestKind kind, PageLayout layout) {
  __shared__ DigestTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  detail::digest_page<kType>(task.page, task.out, kind, layout, threadIdx.x);
}

}  // namespace

void launch_digest(const TaskArray<DigestTask>& tasks, DigestKind kind, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  auto* const kernel = layout.dtype == DType::bf16 ? digest_kernel<DType::bf16>
                       : layout.scaled()           ? digest_kernel<DType::fp8_e4m3>
                                                   : digest_kernel<DType::f16>;
  kernel<<<tasks.count, kThreads, 0, stream>>>(tasks, kind, layout);
  check(cudaGetLastError(), "launch the digest kernel");
}

void load_digest_kernels() {
  load_kernel(digest_kernel<DType::f16>, "load the digest kernel for f16 pages");
  load_kernel(digest_kernel<DType::bf16>, "load the digest kernel for bf16 pages");
  load_kernel(digest_kernel<DType::fp8_e4m3>, "load the digest kernel for fp8 pages");
}

}  // namespace sluice::gpu
