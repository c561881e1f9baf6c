#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "sluice/tensor.hpp"

/// Loads and stores of the three element types as float32. Narrowing rounds to nearest even and keeps NaN with its
/// sign and upper bits, as cpu/float16.hpp does; the hardware's own conversions make every NaN the same.
namespace sluice::gpu::detail {

template <DType kType>
inline constexpr std::uint32_t kElementBytes = bytes_of(kType);

/// Elements that a thread handles at once: 16 bytes of a 16-bit type.
inline constexpr std::uint32_t kUnit = 8;

__device__ __forceinline__ float widen_bf16(std::uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float widen_f16(std::uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

__device__ __forceinline__ std::uint16_t narrow_bf16(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ std::uint16_t narrow_f16(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) {
    return static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | 0x7e00u | ((bits >> 13) & 0x3ffu));
  }
  return __half_as_ushort(__float2half_rn(value));
}

template <DType kType>
__device__ __forceinline__ float load_element(const std::byte* p) {
  if constexpr (kType == DType::f32) return *reinterpret_cast<const float*>(p);
  if constexpr (kType == DType::f16) return widen_f16(*reinterpret_cast<const std::uint16_t*>(p));
  return widen_bf16(*reinterpret_cast<const std::uint16_t*>(p));
}

template <DType kType>
__device__ __forceinline__ void store_element(std::byte* p, float value) {
  if constexpr (kType == DType::f32) {
    *reinterpret_cast<float*>(p) = value;
  } else {
    *reinterpret_cast<std::uint16_t*>(p) = kType == DType::f16 ? narrow_f16(value) : narrow_bf16(value);
  }
}

/// The two elements of one 32-bit word, the first in its lower half.
template <DType kType>
__device__ __forceinline__ float2 widen_word(std::uint32_t word) {
  static_assert(kType != DType::f32);
  if constexpr (kType == DType::bf16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff'0000u));
  } else {
    return make_float2(widen_f16(static_cast<std::uint16_t>(word & 0xffffu)),
                       widen_f16(static_cast<std::uint16_t>(word >> 16)));
  }
}

/// Eight elements of a 16-bit type.
template <DType kType>
__device__ __forceinline__ void widen_unit(const uint4& words, float (&out)[kUnit]) {
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    const float2 pair = widen_word<kType>(word[i]);
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}

/// Eight consecutive elements; `p` is a multiple of 16 bytes.
template <DType kType>
__device__ __forceinline__ void load_unit(const std::byte* p, float (&out)[kUnit]) {
  if constexpr (kType == DType::f32) {
    const float4 a = reinterpret_cast<const float4*>(p)[0];
    const float4 b = reinterpret_cast<const float4*>(p)[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
    widen_unit<kType>(*reinterpret_cast<const uint4*>(p), out);
  }
}

template <DType kType>
__device__ __forceinline__ std::uint32_t narrow_word(float low, float high) {
  static_assert(kType != DType::f32);
  if constexpr (kType == DType::bf16) return narrow_bf16(low) | std::uint32_t{narrow_bf16(high)} << 16;
  return narrow_f16(low) | std::uint32_t{narrow_f16(high)} << 16;
}

template <DType kType>
__device__ __forceinline__ void store_unit(std::byte* p, const float (&in)[kUnit]) {
  if constexpr (kType == DType::f32) {
    reinterpret_cast<float4*>(p)[0] = make_float4(in[0], in[1], in[2], in[3]);
    reinterpret_cast<float4*>(p)[1] = make_float4(in[4], in[5], in[6], in[7]);
  } else {
    *reinterpret_cast<uint4*>(p) = make_uint4(narrow_word<kType>(in[0], in[1]), narrow_word<kType>(in[2], in[3]),
                                              narrow_word<kType>(in[4], in[5]), narrow_word<kType>(in[6], in[7]));
  }
}

}  // namespace sluice::gpu::detail
