#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/describe.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/prefill/prefill_output.cuh"

/// A new key or value as a warp has it, and where it goes.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kRowLanes = 32;
inline constexpr std::uint32_t kMostHeadDim = 256;

/// A row of K or V as a warp has it: four neighbouring elements of each word of a lane, so that what crosses the link
/// goes in whole lines. Requested before it is known where it goes.
struct Row {
  static constexpr std::uint32_t kWords = kMostHeadDim / 4 / kRowLanes;
  float4 x[kWords] = {};
  std::uint32_t words = 0;

  Row() = default;
  /// A launch may have more rows than there are.
  __device__ Row(const TensorView& in, std::uint32_t row, std::uint32_t head)
      : words(row < in.tokens ? in.head_dim / 4 : 0) {
    const std::byte* const from = in.row(row, head);
#pragma unroll
    for (std::uint32_t w = 0; w < kWords; ++w) {
      if (has(w)) x[w] = load_four(from, word(w), in.dtype);
    }
  }
  [[nodiscard]] __device__ std::uint32_t word(std::uint32_t w) const { return threadIdx.x % kRowLanes + w * kRowLanes; }
  [[nodiscard]] __device__ bool has(std::uint32_t w) const { return word(w) < words; }
};

/// To a row's far page and, if there is one, its near page. `kept`, unless null, receives what a reader of the page
/// will see.
template <DType kType>
__device__ void put_row(const Row& row, std::byte* far, std::byte* near, float* kept) {
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!row.has(w)) continue;
    const std::uint32_t word = row.word(w);
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    alignas(8) std::byte rounded[8];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) detail::store_element<kType>(rounded + 2 * i, x[i]);
    const uint2 packed = *reinterpret_cast<const uint2*>(rounded);
    reinterpret_cast<uint2*>(far)[word] = packed;
    if (near != nullptr) reinterpret_cast<uint2*>(near)[word] = packed;
    if (kept == nullptr) continue;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) kept[4 * word + i] = detail::load_element<kType>(rounded + 2 * i);
  }
}

/// The same of a row with a scale. What lies near and what is kept are the rounded values.
__device__ inline void put_scaled_row(const Row& row, std::byte* far, float* far_scale, std::byte* near, float* kept) {
  std::uint32_t largest = 0;
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    for (const float each : x) largest = max(largest, __float_as_uint(each) & 0x7fff'ffffu);
  }
  largest = __reduce_max_sync(0xffff'ffffu, largest);
  const float scale = detail::scale_of(largest);
  const bool finite = scale == scale;
  const float inverse = finite ? detail::inverse_of(scale) : 0.f;
  if (threadIdx.x % kRowLanes == 0) *far_scale = scale;
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!row.has(w)) continue;
    const std::uint32_t word = row.word(w);
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    std::uint32_t codes = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t code = finite ? detail::code_of_e4m3(__fmul_rn(x[i], inverse)) : E4m3::kNaN;
      codes |= code << (8 * i);
    }
    reinterpret_cast<std::uint32_t*>(far)[word] = codes;
    if (near != nullptr) reinterpret_cast<uint2*>(near)[word] = detail::unfold_codes(codes, scale);
    if (kept == nullptr) continue;
    float wide[4];
    detail::widen_codes(codes, scale, wide);
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) kept[4 * word + i] = wide[i];
  }
}

/// A token's key, by warp 0, or value, by warp 1, to its far page, its near page, if it has one, and, of a key, its
/// codes.
template <DType kType>
__device__ void put_token(const ForwardMemory& m, const Row& values, const ForwardToken& token, std::uint32_t plane) {
  __shared__ float key[kMostHeadDim];
  const std::uint32_t is_value = threadIdx.x / kRowLanes;
  const std::uint32_t row = m.row_of(token.list, token.position);
  const std::uint32_t block = row >> m.page_shift;
  const std::uint32_t page_row = row & (m.layout.page_tokens - 1);
  const std::uint32_t place = m.near_row_of(plane, row);
  std::byte* const near = place == kNone ? nullptr : m.near_key(plane, place) + is_value * m.layout.half_bytes();
  std::byte* const page = m.far_block(plane, block);
  std::byte* const far = page + page_row * m.far_layout.row_bytes() + is_value * m.far_layout.half_bytes();
  float* const kept = is_value == 0 ? key : nullptr;
  if constexpr (detail::kScaled<kType>) {
    auto* const scales = reinterpret_cast<float*>(page + m.far_layout.scales_offset()) + 2 * page_row;
    put_scaled_row(values, far, scales + is_value, near, kept);
  } else {
    put_row<kType>(values, far, near, kept);
  }
  if (is_value != 0) return;
  __syncwarp();
  const Int4Layout copy(m.layout);
  detail::codes_of_row([](std::uint32_t channel) { return key[channel]; },
                       m.codes + m.far_page(plane, block) * copy.page_bytes(), page_row, copy);
}

}  // namespace sluice::gpu::forward
