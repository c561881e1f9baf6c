#pragma once

#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/index/value_mean.cuh"
#include "gpu/kernels/overlap.cuh"

/// Means of pages' values, for rests: made as soon as all tokens of a page have come, before a row counts it, see
/// ForwardRow::full_before.
namespace sluice::gpu::forward {

/// The mean of the page that ended before a token that begins one. One warp.
template <DType kType>
__device__ __noinline__ void mean_of_page_before(const ForwardMemory& m, const ForwardToken& token,
                                                 std::uint32_t plane) {
  if (token.position == 0 || (token.position & (m.layout.page_tokens - 1)) != 0) return;
  const std::uint32_t block = m.row_of(token.list, token.position - 1) >> m.page_shift;
  detail::mean_page<kType>(m.far_block(plane, block), m.value_mean_of(plane, block), m.far_layout, threadIdx.x % 32);
}

/// Thread block (x, y): packed row x, KV head y. The mean of the page that its token has filled, the others of which
/// may have come with the same launch, and of the page before one that it begins, whose last token may have come by
/// itself.
template <DType kType>
__global__ void __launch_bounds__(32) mean_rows_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardToken token = m.tokens[blockIdx.x];
  if (token.list == kNone) return;
  const std::uint32_t plane = m.plane(layer, blockIdx.y);
  mean_of_page_before<kType>(m, token, plane);
  // As the page before the next token's.
  mean_of_page_before<kType>(m, {.list = token.list, .position = token.position + 1}, plane);
}

}  // namespace sluice::gpu::forward
