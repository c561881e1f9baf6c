// Copies in codes and digests of pages that no forward has written, see ForwardVerbs::derive.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/digest.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarp = 32;

/// One thread block per page, one warp per row at a time. `pages` and `mean` are in pinned memory.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    derive_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t plane, const FarPage* pages,
                  const float* mean_key) {
  __shared__ float staged[kThreads / kWarp][detail::kMostHeadDim];
  const FarPage of = pages[blockIdx.x];
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::byte* const page = m.far_block(plane, of.block);
  if (m.has_codes()) {
    const CodeLayout layout = m.code_layout();
    detail::HeadLanes mean = {};
    if (mean_key != nullptr)
      detail::each_channel(layout.head_dim,
                           [&](std::uint32_t i, std::uint32_t channel) { mean[i] = mean_key[channel]; });
    std::byte* const copy = m.codes + m.far_page(plane, of.block) * layout.page_bytes();
    for (std::uint32_t row = warp; row < of.rows; row += kThreads / kWarp)
      detail::codes_of_row(detail::PageKey<kType>(page, m.far_layout, row), mean, staged[warp], copy, row, layout);
  }
  if (m.digests == nullptr || of.rows != m.layout.page_tokens || warp != 0) return;
  detail::digest_page<kType>(page, m.digest_of(plane, of.block), m.digest, m.far_layout, threadIdx.x);
}

}  // namespace

void launch_forward_derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages,
                           const float* mean, cudaStream_t stream) {
  if (pages.empty() || (!memory.has_codes() && memory.digests == nullptr)) return;
  auto* const kernel = memory.far_layout.dtype == DType::bf16 ? derive_kernel<DType::bf16>
                       : memory.far_layout.scaled()           ? derive_kernel<DType::fp8_e4m3>
                                                              : derive_kernel<DType::f16>;
  kernel<<<static_cast<std::uint32_t>(pages.size()), kThreads, 0, stream>>>(memory, plane, pages.data(), mean);
  check(cudaGetLastError(), "launch the kernel that derives codes and digests of pages");
}

namespace detail {
void load_forward_derive_kernels() {
  const auto load = [](auto*... kernels) { (load_kernel(kernels, "load the kernels of a forward"), ...); };
  load(derive_kernel<DType::f16>, derive_kernel<DType::bf16>, derive_kernel<DType::fp8_e4m3>);
}
}  // namespace detail

}  // namespace sluice::gpu
