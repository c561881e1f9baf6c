#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "sluice/tensor.hpp"

namespace sluice::cpu {
namespace {

/// The vector operations that the kernels are written in, on AVX2 with FMA and F16C: eight floats.
///
/// Everything in the translation unit of an instruction set has internal linkage: the linker would keep one
/// copy of a shared inline function, perhaps this one, for CPUs that cannot run it. Hence the anonymous
/// namespaces, and no standard library beyond types.
struct Simd {
  using Vec = __m256;
  /// Two vectors of consecutive elements, in the order in which they are cheapest to widen: see for_each_place.
  struct Pair {
    Vec a, b;
  };
  static constexpr std::uint32_t kWidth = 8;
  static constexpr std::uint32_t kAccumulators = 8;  ///< of the 16 registers, for sums
  static constexpr std::uint32_t kGemmRows = 6;      ///< 6 x 2 sums, 2 columns, 1 broadcast: 15 registers
  static constexpr std::uint32_t kGemmVecs = 2;

  static Vec set(float x) noexcept { return _mm256_set1_ps(x); }
  static Vec load(const float* p) noexcept { return _mm256_loadu_ps(p); }
  /// Four floats each from p, p + stride and so on. Put together in memory they would be waited for: what a load needs
  /// of several stores a CPU does not hand over.
  static Vec load_fours(const float* p, std::size_t stride) noexcept {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + stride), 1);
  }
  static void store(float* p, Vec v) noexcept { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) noexcept { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) noexcept { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) noexcept { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) noexcept { return _mm256_fmadd_ps(a, b, c); }
  /// `b` where either is NaN; the same for min.
  static Vec max(Vec a, Vec b) noexcept { return _mm256_max_ps(a, b); }
  static Vec min(Vec a, Vec b) noexcept { return _mm256_min_ps(a, b); }
  static Vec abs(Vec a) noexcept { return _mm256_andnot_ps(set(-0.f), a); }
  /// By the sign bit of `sign`.
  static Vec by_sign(Vec sign, Vec positive, Vec negative) noexcept { return _mm256_blendv_ps(positive, negative, sign); }
  /// `v`, but 0 where x < limit; `v` where x is NaN.
  static Vec zero_below(Vec x, float limit, Vec v) noexcept {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set(limit), _CMP_LT_OQ), v);
  }
  /// Lane i of `v` if bit i is set, else of `other`.
  static Vec keep(std::uint32_t bits, Vec v, Vec other) noexcept {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set_bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set_bits, lane)));
  }
  static Vec round(Vec x) noexcept { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// x * 2^power for integers in [-126, 127].
  static Vec scale(Vec x, Vec power) noexcept {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  /// Lane i is the sum over v[i]: one tree for kWidth sums instead of one reduction for each.
  static Vec sum_lanes(const Vec (&v)[kWidth]) noexcept {
    const Vec low = quarter_sums(v[0], v[1], v[2], v[3]);
    const Vec high = quarter_sums(v[4], v[5], v[6], v[7]);
    return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }
  /// Every lane becomes the maximum (sum) over the lanes that are congruent to it modulo kPeriod.
  template <std::uint32_t kPeriod>
  static Vec fold_max(Vec v) noexcept {
    v = max(v, _mm256_permute2f128_ps(v, v, 1));
    if constexpr (kPeriod <= 2) v = max(v, _mm256_permute_ps(v, 0x4e));
    if constexpr (kPeriod == 1) v = max(v, _mm256_permute_ps(v, 0xb1));
    return v;
  }
  template <std::uint32_t kPeriod>
  static Vec fold_add(Vec v) noexcept {
    v = add(v, _mm256_permute2f128_ps(v, v, 1));
    if constexpr (kPeriod <= 2) v = add(v, _mm256_permute_ps(v, 0x4e));
    if constexpr (kPeriod == 1) v = add(v, _mm256_permute_ps(v, 0xb1));
    return v;
  }

  /// kWidth consecutive elements, widened, in order; and back, rounded to nearest even. The bits of an e4m3 code, read
  /// as those of a float32, are its value times 2^-120, subnormals included; its two NaN become 480 and -480 there, as
  /// only rows whose scale is NaN have them.
  template <DType kType>
  static Vec load_as(const std::byte* p) noexcept {
    if constexpr (kType == DType::f32) return load(reinterpret_cast<const float*>(p));
    if constexpr (kType == DType::fp8_e4m3) {
      const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
      const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(codes, 20), _mm256_set1_epi32(kE4m3Bits));
      return mul(_mm256_castsi256_ps(bits), set(0x1p120f));
    }
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (kType == DType::f16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  template <DType kType>
  static void store_as(std::byte* p, Vec v) noexcept {
    if constexpr (kType == DType::f32) {
      store(reinterpret_cast<float*>(p), v);
    } else if constexpr (kType == DType::f16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    } else {
      const __m256i words = bf16_words(v);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
  }
  /// 2 * kWidth consecutive elements. bf16 splits into even and odd ones: a shift and a mask, both exact.
  template <DType kType>
  static Pair load_pair(const std::byte* p) noexcept {
    if constexpr (kType == DType::bf16) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
              _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff'0000u))))};
    } else {
      constexpr std::uint32_t kBytes = kWidth * (kType == DType::f32 ? 4 : kType == DType::fp8_e4m3 ? 1 : 2);
      return {load_as<kType>(p), load_as<kType>(p + kBytes)};
    }
  }
  /// kWidth elements where the row ends, in the order of a pair, the rest 0. Never called at this width: 16
  /// elements are a whole pair.
  template <DType kType>
  static Pair load_half(const std::byte* p) noexcept {
    return load_pair<kType>(p);
  }

  /// Up to kWidth words of 4-bit codes, the rest 0; and the n-th code of each as a float.
  using Words = __m256i;
  static Words load_words(const std::byte* p, std::uint32_t count) noexcept {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(p),
                                 _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
  }
  static Vec code(Words words, std::uint32_t n) noexcept {
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(words, static_cast<int>(4 * n)), _mm256_set1_epi32(15)));
  }

 private:
  /// What is left of a code that was widened with its sign and shifted: the sign, 4 bits of exponent, 3 of mantissa.
  static constexpr auto kE4m3Bits = static_cast<int>(0x87f0'0000u);
  /// Sums of four vectors within each 128-bit quarter: lane i of a quarter belongs to vector i.
  static Vec quarter_sums(Vec a, Vec b, Vec c, Vec d) noexcept {
    const __m256d ab = _mm256_castps_pd(add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    return add(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  }
  static __m256i bf16_words(Vec v) noexcept {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040'0000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  }
};

}  // namespace
}  // namespace sluice::cpu
