// The mean keys of sequences that a plan makes again, see ForwardKeyMean.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/key_mean.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarp = 32;

/// The mean of channel `channel` of a full page.
template <DType kType>
__device__ float mean_of_channel(const std::byte* page, const PageLayout& layout, std::uint32_t channel) {
  float sum = 0.f;
#pragma unroll 8
  for (std::uint32_t row = 0; row < layout.page_tokens; ++row)
    sum = detail::add_key(sum, detail::PageKey<kType>(page, layout, row)(channel));
  return detail::mean_of_keys(sum, layout.page_tokens);
}

/// Thread block (x, y): plane x, mean key y.
template <DType kType>
__global__ void __launch_bounds__(kThreads) key_means_kernel(const __grid_constant__ ForwardMemory m) {
  __shared__ float means[detail::kMostHeadDim];
  __shared__ float staged[kThreads / kWarp][detail::kMostHeadDim];
  const ForwardKeyMean of = m.slip_key_means[blockIdx.y];
  const std::uint32_t plane = blockIdx.x;
  const std::uint32_t block = of.tokens == 0 ? 0 : m.list_of(of.list)[0];
  const std::byte* const page = m.far_block(plane, block);
  for (std::uint32_t c = threadIdx.x; c < m.shape.head_dim; c += kThreads) {
    const float mean = of.tokens < m.layout.page_tokens ? 0.f : mean_of_channel<kType>(page, m.far_layout, c);
    means[c] = m.key_mean_of(of.list, plane)[c] = mean;
  }
  __syncthreads();
  const CodeLayout layout = m.code_layout();
  detail::HeadLanes mean = {};
  detail::each_channel(layout.head_dim, [&](std::uint32_t i, std::uint32_t channel) { mean[i] = means[channel]; });
  std::byte* const copy = m.codes + m.far_page(plane, block) * layout.page_bytes();
  const std::uint32_t rows = min(of.tokens, m.layout.page_tokens);
  for (std::uint32_t row = threadIdx.x / kWarp; row < rows; row += kThreads / kWarp)
    detail::codes_of_row(detail::PageKey<kType>(page, m.far_layout, row), mean, staged[threadIdx.x / kWarp], copy, row,
                         layout);
}

}  // namespace

void launch_forward_key_means(const ForwardMemory& memory, cudaStream_t stream) {
  const dim3 grid(memory.planes(), memory.slip->key_means);
  if (grid.y == 0 || !memory.has_codes()) return;
  auto* const kernel = memory.far_layout.dtype == DType::bf16 ? key_means_kernel<DType::bf16>
                       : memory.far_layout.scaled()           ? key_means_kernel<DType::fp8_e4m3>
                                                              : key_means_kernel<DType::f16>;
  kernel<<<grid, kThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel of mean keys");
}

namespace detail {
void load_forward_key_means_kernels() {
  const auto load = [](auto*... kernels) { (load_kernel(kernels, "load the kernels of a forward"), ...); };
  load(key_means_kernel<DType::f16>, key_means_kernel<DType::bf16>, key_means_kernel<DType::fp8_e4m3>);
}
}  // namespace detail

}  // namespace sluice::gpu
