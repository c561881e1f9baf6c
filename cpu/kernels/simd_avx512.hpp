#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "sluice/tensor.hpp"

namespace sluice::cpu {
namespace {

/// The vector operations that the kernels are written in, on AVX-512 (F, BW, VL, DQ): sixteen floats.
/// simd_avx2.hpp documents the operations and why everything here has internal linkage.
struct Simd {
  using Vec = __m512;
  struct Pair {
    Vec a, b;
  };
  static constexpr std::uint32_t kWidth = 16;
  static constexpr std::uint32_t kAccumulators = 16;
  static constexpr std::uint32_t kGemmRows = 6;  ///< 6 x 4 sums, 4 columns, 1 broadcast: 29 of 32 registers
  static constexpr std::uint32_t kGemmVecs = 4;

  static Vec set(float x) noexcept { return _mm512_set1_ps(x); }
  static Vec load(const float* p) noexcept { return _mm512_loadu_ps(p); }
  static Vec load_fours(const float* p, std::size_t stride) noexcept {
    const __m512 first = _mm512_castps128_ps512(_mm_loadu_ps(p));
    const __m512 two = _mm512_insertf32x4(first, _mm_loadu_ps(p + stride), 1);
    const __m512 three = _mm512_insertf32x4(two, _mm_loadu_ps(p + 2 * stride), 2);
    return _mm512_insertf32x4(three, _mm_loadu_ps(p + 3 * stride), 3);
  }
  static void store(float* p, Vec v) noexcept { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) noexcept { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) noexcept { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) noexcept { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) noexcept { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) noexcept { return _mm512_max_ps(a, b); }
  static Vec min(Vec a, Vec b) noexcept { return _mm512_min_ps(a, b); }
  static Vec abs(Vec a) noexcept { return _mm512_andnot_ps(set(-0.f), a); }
  static Vec by_sign(Vec sign, Vec positive, Vec negative) noexcept {
    return _mm512_mask_mov_ps(positive, _mm512_movepi32_mask(_mm512_castps_si512(sign)), negative);
  }
  static Vec zero_below(Vec x, float limit, Vec v) noexcept {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_NLT_UQ), v);
  }
  static Vec keep(std::uint32_t bits, Vec v, Vec other) noexcept {
    return _mm512_mask_mov_ps(other, static_cast<__mmask16>(bits), v);
  }
  static Vec round(Vec x) noexcept { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec scale(Vec x, Vec power) noexcept { return _mm512_scalef_ps(x, power); }
  static Vec sum_lanes(const Vec (&v)[kWidth]) noexcept {
    const Vec low = half_sums(quarter_sums(v), quarter_sums(v + 4));
    const Vec high = half_sums(quarter_sums(v + 8), quarter_sums(v + 12));
    return half_sums(low, high);
  }
  template <std::uint32_t kPeriod>
  static Vec fold_max(Vec v) noexcept {
    v = max(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = max(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    if constexpr (kPeriod <= 2) v = max(v, _mm512_permute_ps(v, 0x4e));
    if constexpr (kPeriod == 1) v = max(v, _mm512_permute_ps(v, 0xb1));
    return v;
  }
  template <std::uint32_t kPeriod>
  static Vec fold_add(Vec v) noexcept {
    v = add(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = add(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    if constexpr (kPeriod <= 2) v = add(v, _mm512_permute_ps(v, 0x4e));
    if constexpr (kPeriod == 1) v = add(v, _mm512_permute_ps(v, 0xb1));
    return v;
  }

  template <DType kType>
  static Vec load_as(const std::byte* p) noexcept {
    if constexpr (kType == DType::f32) return load(reinterpret_cast<const float*>(p));
    if constexpr (kType == DType::fp8_e4m3) {
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(codes, 20), _mm512_set1_epi32(kE4m3Bits));
      return mul(_mm512_castsi512_ps(bits), set(0x1p120f));
    }
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (kType == DType::f16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  template <DType kType>
  static void store_as(std::byte* p, Vec v) noexcept {
    if constexpr (kType == DType::f32) {
      store(reinterpret_cast<float*>(p), v);
    } else if constexpr (kType == DType::f16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_words(v)));
    }
  }
  template <DType kType>
  static Pair load_pair(const std::byte* p) noexcept {
    if constexpr (kType == DType::bf16) {
      return split(_mm512_loadu_si512(p));
    } else {
      constexpr std::uint32_t kBytes = kWidth * (kType == DType::f32 ? 4 : kType == DType::fp8_e4m3 ? 1 : 2);
      return {load_as<kType>(p), load_as<kType>(p + kBytes)};
    }
  }
  template <DType kType>
  static Pair load_half(const std::byte* p) noexcept {
    if constexpr (kType == DType::bf16) {
      return split(_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    } else {
      return {load_as<kType>(p), set(0.f)};
    }
  }

  /// Up to kWidth words of 4-bit codes, the rest 0; and the n-th code of each as a float.
  using Words = __m512i;
  static Words load_words(const std::byte* p, std::uint32_t count) noexcept {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p);
  }
  static Vec code(Words words, std::uint32_t n) noexcept {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 4 * n), _mm512_set1_epi32(15)));
  }

 private:
  static constexpr auto kE4m3Bits = static_cast<int>(0x87f0'0000u);  ///< see simd_avx2.hpp
  static Pair split(__m512i words) noexcept {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff'0000u))))};
  }
  static Vec quarter_sums(const Vec* v) noexcept {
    const __m512d ab = _mm512_castps_pd(add(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])));
    const __m512d cd = _mm512_castps_pd(add(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3])));
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  /// Neighbouring quarters added: those of `a` in the lower half, those of `b` in the upper.
  static Vec half_sums(Vec a, Vec b) noexcept {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  static __m512i bf16_words(Vec v) noexcept {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040'0000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16);
  }
};

}  // namespace
}  // namespace sluice::cpu
