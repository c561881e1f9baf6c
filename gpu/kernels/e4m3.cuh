#pragma once

#include "gpu/kernels/elements.cuh"
#include "sluice/step/e4m3.hpp"

/// Rows with scales, see E4m3, as the CPU makes and reads them, bit by bit. In software, which every GPU has: what
/// crosses the link takes longer than this.
namespace sluice::gpu::detail {

/// Whether pages of this type have a scale for each row, and what their rows are near.
template <DType kType>
inline constexpr bool kScaled = kType == DType::fp8_e4m3;
template <DType kType>
inline constexpr DType kNearType = kScaled<kType> ? DType::bf16 : kType;

/// The scale of a row by the bits of its largest magnitude.
__device__ __forceinline__ float scale_of(std::uint32_t largest) {
  constexpr std::uint32_t kExponentShift = 23;
  constexpr std::uint32_t kAboveThat = 0x007f'ffffu - 0x0060'0000u;  // 448 is 1.75 * 2^8.
  if (largest >= 0x7f80'0000u) return __uint_as_float(0x7fc0'0000u);
  const std::uint32_t least = __float_as_uint(E4m3::kLeastScale) >> kExponentShift;
  const std::uint32_t most = __float_as_uint(E4m3::kMostScale) >> kExponentShift;
  const std::uint32_t exponent = max((largest + kAboveThat) >> kExponentShift, least + 8) - 8;
  return __uint_as_float(min(exponent, most) << kExponentShift);
}

/// 1 / scale, exactly: it is a power of two.
__device__ __forceinline__ float inverse_of(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

/// The code that is nearest to x, which is not NaN.
__device__ __forceinline__ std::uint32_t code_of_e4m3(float x) {
  constexpr std::uint32_t kShift = 20;
  const std::uint32_t bits = __float_as_uint(x);
  const std::uint32_t magnitude = min(bits & 0x7fff'ffffu, __float_as_uint(E4m3::kLargest));
  const std::uint32_t rounded = (magnitude + ((1u << (kShift - 1)) - 1) + (magnitude >> kShift & 1u)) >> kShift;
  const std::uint32_t normal = rounded - ((127u - 7u) << 3);
  // 2^14 is a float32 whose unit is that of subnormal codes: the addition rounds.
  const std::uint32_t subnormal =
      __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - __float_as_uint(0x1p14f);
  return (bits >> 24 & 0x80u) | (magnitude < __float_as_uint(0x1p-6f) ? subnormal : normal);
}

/// What a code stands for, but for its row's scale; NaN is only in rows whose scale is NaN.
__device__ __forceinline__ float widen_e4m3(std::uint32_t code) {
  const std::uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
  return __fmul_rn(__uint_as_float(bits), 0x1p120f);
}

/// Four codes of a word, times the scale of their row.
__device__ __forceinline__ void widen_codes(std::uint32_t codes, float scale, float (&out)[4]) {
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) out[i] = __fmul_rn(widen_e4m3(codes >> (8 * i) & 0xffu), scale);
}

/// The same as they lie near.
__device__ __forceinline__ uint2 unfold_codes(std::uint32_t codes, float scale) {
  float wide[4];
  widen_codes(codes, scale, wide);
  return make_uint2(narrow_word<DType::bf16>(wide[0], wide[1]), narrow_word<DType::bf16>(wide[2], wide[3]));
}
__device__ __forceinline__ uint4 unfold_codes(const uint2& codes, float scale) {
  const uint2 low = unfold_codes(codes.x, scale);
  const uint2 high = unfold_codes(codes.y, scale);
  return make_uint4(low.x, low.y, high.x, high.y);
}

/// Four codes as two words of bf16, without a scale. The bits of a code, read as those of a bf16, are its value times
/// 2^-120.
__device__ __forceinline__ uint2 bf16_of_codes(std::uint32_t codes) {
  const __nv_bfloat162 unit = __bfloat162bfloat162(__ushort_as_bfloat16(0x7b80));  // 2^120
  const auto widen = [&](std::uint32_t pair) {  // Codes in the upper byte of each half.
    const std::uint32_t bits = (pair >> 4 & 0x07f0'07f0u) | (pair & 0x8000'8000u);
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), unit);
    return *reinterpret_cast<const std::uint32_t*>(&value);
  };
  return make_uint2(widen(__byte_perm(codes, 0, 0x1404)), widen(__byte_perm(codes, 0, 0x3424)));
}
/// The same times the scale of their row, as unfold_codes has it: products with a power of two are exact.
__device__ __forceinline__ uint2 bf16_of_codes(std::uint32_t codes, float scale) {
  const __nv_bfloat162 of_row = __bfloat162bfloat162(__float2bfloat16(scale));
  const auto times = [&](std::uint32_t pair) {
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), of_row);
    return *reinterpret_cast<const std::uint32_t*>(&value);
  };
  const uint2 plain = bf16_of_codes(codes);
  return make_uint2(times(plain.x), times(plain.y));
}

}  // namespace sluice::gpu::detail
