#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/index/rotate.cuh"
#include "sluice/step/int4.hpp"
#include "sluice/step/page.hpp"

/// One row of a copy in codes, by one warp; see CodeLayout. The same operations in the same order as on the CPU,
/// without contraction: the copies are equal bit by bit.
namespace sluice::gpu::detail {

inline constexpr std::uint32_t kUnitCodes = 8;  ///< of a unit
inline constexpr std::uint32_t kMostHeadDim = 256;

/// What a lane has of a head: channels i * 32 + lane.
using HeadLanes = float[kMostHeadDim / 32];
/// calls use(i, channel) for each of them.
template <class Use>
__device__ __forceinline__ void each_channel(std::uint32_t head_dim, const Use& use) {
#pragma unroll
  for (std::uint32_t i = 0; i < kMostHeadDim / 32; ++i) {
    if (i * 32 < head_dim) use(i, i * 32 + threadIdx.x % 32);
  }
}

/// A K row of a far page.
template <DType kType>
struct PageKey {
  const std::byte* row;
  float scale = 1.f;

  __device__ PageKey(const std::byte* page, const PageLayout& layout, std::uint32_t at)
      : row(page + std::uint64_t{at} * layout.row_bytes()) {
    if constexpr (kScaled<kType>) scale = reinterpret_cast<const float*>(page + layout.scales_offset())[2 * at];
  }
  [[nodiscard]] __device__ float operator()(std::uint32_t channel) const {
    if constexpr (kScaled<kType>)
      return __fmul_rn(widen_e4m3(std::to_integer<std::uint32_t>(row[channel])), scale);
    else
      return load_element<kType>(row + channel * kElementBytes<kType>);
  }
};

__device__ __forceinline__ float warp_min(float x) {
  for (int step = 16; step > 0; step /= 2) x = fminf(x, __shfl_xor_sync(0xffff'ffffu, x, step));
  return x;
}

/// Scale and zero of a row, before they are rounded.
struct RowParams {
  float scale, zero;
};
__device__ __forceinline__ RowParams params_of(float least, float most, const CodeLayout& layout) {
  float scale = __fdiv_rn(__fsub_rn(most, least), layout.steps());
  scale = scale < CodeLayout::kSmallest ? CodeLayout::kSmallest : scale;
  scale = scale < CodeLayout::kLargest ? scale : CodeLayout::kLargest;
  float zero = least;
  if (layout.few()) zero = __fadd_rn(__fmul_rn(least, 1.f - CodeLayout::kBeyond), __fmul_rn(most, CodeLayout::kBeyond));
  zero = zero > -CodeLayout::kLargest ? zero : -CodeLayout::kLargest;
  zero = zero < CodeLayout::kLargest ? zero : CodeLayout::kLargest;
  return {scale, __fadd_rn(zero, 0.f)};
}

__device__ __forceinline__ std::uint32_t code_of(float x, float zero, float inverse, float top) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  float code = __fmul_rn(__fsub_rn(x, zero), inverse);
  code = code > 0.f ? code : 0.f;  // NaN too
  code = code < top ? code : top;
  return __float_as_uint(__fadd_rn(code, kRound)) & 15u;
}

/// The unit of a lane, as a word of 4 bits each, to where it lies.
__device__ __forceinline__ void store_unit(std::uint32_t word, std::byte* copy, std::uint32_t row,
                                           const CodeLayout& layout) {
  const std::uint32_t lane = threadIdx.x % 32;
  std::byte* const codes = copy + layout.codes_offset(row);
  if (!layout.few()) {
    reinterpret_cast<std::uint32_t*>(codes)[lane] = word;
    return;
  }
  const std::uint32_t ab = (word & 0x0707u) | (word & 0x7070u) >> 1 | (word >> 24 & 3u) << 6 | (word >> 28 & 3u) << 14;
  const std::uint32_t c = (word >> 16 & 0x77u) | (word >> 23 & 0x88u);
  reinterpret_cast<std::uint16_t*>(codes)[lane] = static_cast<std::uint16_t>(ab);
  reinterpret_cast<std::uint8_t*>(copy + layout.thirds_offset(row))[lane] = static_cast<std::uint8_t>(c);
}

/// One unit of codes per lane. `rotated`: [head_dim]
__device__ inline void codes_of_rotated(const float* rotated, std::byte* copy, std::uint32_t row,
                                        const CodeLayout& layout) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t words = layout.units();
  float x[kUnitCodes] = {};
  float least = __int_as_float(0x7f80'0000);
  float most = -least;
  bool nan = false;
  if (lane < words) {
#pragma unroll
    for (std::uint32_t n = 0; n < kUnitCodes; ++n) {
      x[n] = rotated[n * words + lane];
      least = fminf(least, x[n]);
      most = fmaxf(most, x[n]);
      nan |= x[n] != x[n];
    }
  }
  RowParams params = params_of(warp_min(least), -warp_min(-most), layout);
  if (__any_sync(0xffff'ffffu, nan)) params = {__uint_as_float(0x7fc0'0000u), __uint_as_float(0x7fc0'0000u)};
  const std::uint32_t stored = narrow_f16(params.scale) | static_cast<std::uint32_t>(narrow_f16(params.zero)) << 16;
  const float scale = widen_f16(static_cast<std::uint16_t>(stored & 0xffffu));
  const float zero = widen_f16(static_cast<std::uint16_t>(stored >> 16));
  const float inverse = scale == scale ? __fdiv_rn(1.f, scale) : 0.f;
  const auto top = static_cast<float>(layout.levels());
  std::uint32_t word = 0;
#pragma unroll
  for (std::uint32_t n = 0; n < kUnitCodes; ++n) word |= code_of(x[n], zero, inverse, top) << (4 * n);
  if (lane < words) store_unit(word, copy, row, layout);
  if (lane == 0) reinterpret_cast<std::uint32_t*>(copy + layout.params_offset())[row] = stored;
}

/// `key(channel)` is the row's element, `mean` the mean key; `copy` the page's copy, in which it is row `row`. `staged`:
/// [head_dim] shared memory of the warp, of which a lane's own channels may be what `key` reads.
template <class Key>
__device__ void codes_of_row(const Key& key, const HeadLanes& mean, float* staged, std::byte* copy, std::uint32_t row,
                             const CodeLayout& layout) {
  HeadLanes rotated = {};
  each_channel(layout.head_dim,
               [&](std::uint32_t i, std::uint32_t channel) { rotated[i] = __fsub_rn(key(channel), mean[i]); });
  rotate(rotated, layout.head_dim);
  each_channel(layout.head_dim, [&](std::uint32_t i, std::uint32_t channel) { staged[channel] = rotated[i]; });
  __syncwarp();
  codes_of_rotated(staged, copy, row, layout);
  __syncwarp();  // Before it is staged anew.
}

}  // namespace sluice::gpu::detail
