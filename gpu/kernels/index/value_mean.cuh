#pragma once

#include "gpu/kernels/index/digest.cuh"

/// The mean of a page's values, as the CPU makes it, bit by bit.
namespace sluice::gpu::detail {

/// Lane `lane` of a warp: its eight columns, if there are as many. Of a type with scales the mean is of bf16.
template <DType kType>
__device__ __forceinline__ void mean_page(const std::byte* page, std::byte* out, const PageLayout& layout,
                                          std::uint32_t lane) {
  if (lane >= layout.head_dim / kUnit) return;
  constexpr DType kMade = kNearType<kType>;
  const auto* const scales = reinterpret_cast<const float*>(page + layout.scales_offset());
  const Columns columns{.k = page + layout.half_bytes() + lane * kUnit * kElementBytes<kType>,
                        .scales = scales + 1,  // Of each row the key's comes first.
                        .rows = layout.page_tokens,
                        .row_bytes = layout.head_dim * kElementBytes<kType>};
  float sum[kUnit] = {};
#pragma unroll 8
  for (std::uint32_t r = 0; r < columns.rows; ++r) {
    float v[kUnit];
    load_columns<kType>(columns, r, v);
#pragma unroll
    for (std::uint32_t c = 0; c < kUnit; ++c) sum[c] = __fadd_rn(sum[c], v[c]);
  }
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) sum[c] = __fdiv_rn(sum[c], static_cast<float>(columns.rows));
  store_unit<kMade>(out + lane * kUnit * kElementBytes<kMade>, sum);
}

}  // namespace sluice::gpu::detail
