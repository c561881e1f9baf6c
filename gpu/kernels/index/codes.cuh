#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/index/rotate.cuh"
#include "sluice/page.hpp"
#include "sluice/step/int4.hpp"

/// One row of a 4-bit copy, by one warp; see Int4Layout. The same operations in the same order as on the CPU, without
/// contraction: the copies are equal bit by bit.
namespace sluice::gpu::detail {

inline constexpr std::uint32_t kCodesPerWord = 8;
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
__device__ __forceinline__ RowParams params_of(float least, float most) {
  float scale = __fdiv_rn(__fsub_rn(most, least), static_cast<float>(Int4Layout::kLevels));
  scale = scale < Int4Layout::kSmallest ? Int4Layout::kSmallest : scale;
  scale = scale < Int4Layout::kLargest ? scale : Int4Layout::kLargest;
  float zero = least > -Int4Layout::kLargest ? least : -Int4Layout::kLargest;
  zero = zero < Int4Layout::kLargest ? zero : Int4Layout::kLargest;
  return {scale, __fadd_rn(zero, 0.f)};
}

__device__ __forceinline__ std::uint32_t code_of(float x, float zero, float inverse) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr auto kTop = static_cast<float>(Int4Layout::kLevels);
  float code = __fmul_rn(__fsub_rn(x, zero), inverse);
  code = code > 0.f ? code : 0.f;  // NaN too
  code = code < kTop ? code : kTop;
  return __float_as_uint(__fadd_rn(code, kRound)) & 15u;
}

/// One word of codes per lane. `rotated`: [head_dim]
__device__ inline void codes_of_rotated(const float* rotated, std::byte* copy, std::uint32_t row,
                                        const Int4Layout& layout) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t words = layout.words();
  float x[kCodesPerWord] = {};
  float least = __int_as_float(0x7f80'0000);
  float most = -least;
  bool nan = false;
  if (lane < words) {
#pragma unroll
    for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
      x[n] = rotated[n * words + lane];
      least = fminf(least, x[n]);
      most = fmaxf(most, x[n]);
      nan |= x[n] != x[n];
    }
  }
  RowParams params = params_of(warp_min(least), -warp_min(-most));
  if (__any_sync(0xffff'ffffu, nan)) params = {__uint_as_float(0x7fc0'0000u), __uint_as_float(0x7fc0'0000u)};
  const std::uint32_t stored = narrow_f16(params.scale) | static_cast<std::uint32_t>(narrow_f16(params.zero)) << 16;
  const float scale = widen_f16(static_cast<std::uint16_t>(stored & 0xffffu));
  const float zero = widen_f16(static_cast<std::uint16_t>(stored >> 16));
  const float inverse = scale == scale ? __fdiv_rn(1.f, scale) : 0.f;
  std::uint32_t word = 0;
#pragma unroll
  for (std::uint32_t n = 0; n < kCodesPerWord; ++n) word |= code_of(x[n], zero, inverse) << (4 * n);
  if (lane < words) reinterpret_cast<std::uint32_t*>(copy)[row * words + lane] = word;
  if (lane == 0) reinterpret_cast<std::uint32_t*>(copy + layout.params_offset())[row] = stored;
}

/// `key(channel)` is the row's element, `mean` the mean key; `copy` the page's copy, in which it is row `row`. `staged`:
/// [head_dim] shared memory of the warp, of which a lane's own channels may be what `key` reads.
template <class Key>
__device__ void codes_of_row(const Key& key, const HeadLanes& mean, float* staged, std::byte* copy, std::uint32_t row,
                             const Int4Layout& layout) {
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
