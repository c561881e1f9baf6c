#pragma once

// Included after simd_avx512.hpp, in a translation unit for AVX-512 with VNNI.

#include "cpu/kernels/int4.hpp"

namespace sluice::cpu {
namespace {

/// Channels of the keys that are scored so: two vectors of words of codes.
constexpr std::uint32_t kMaxBytesDim = 256;

/// Rotated queries as integers of 22 bits, of which codes are multiplied with seven and a sign at a time, as the bytes that
/// they are: channel x is unit * (128 * 128 * high + 128 * middle + low). Rounding takes less than a millionth of the
/// head's largest channel from x, about as much as float32 sums do.
struct Int4ByteQueries {
  static constexpr std::uint32_t kBytes = 64;  ///< of a vector
  static constexpr std::uint32_t kParts = 3;   ///< of an integer, the high one first
  static constexpr int kLargest = 127 * 128 * 128;

  /// [group][vectors of words][parts][codes 0, 2, 4, 6 of a word, codes 1, 3, 5, 7]
  alignas(64) std::int8_t packed[kMaxGroup * kParts * kMaxBytesDim];
  float units[kMaxGroup];
  float sums[kMaxGroup], shifts[kMaxGroup];  ///< as Int4Queries has them
  std::uint32_t words, vectors, stride;
  bool exact = true;  ///< false: some head cannot be written so

  Int4ByteQueries(const float* q, const float* mean, std::uint32_t group, std::uint32_t head_dim, float scale) noexcept
      : words(head_dim / kCodesPerWord), vectors((words + kWidth - 1) / kWidth), stride(vectors * 2 * kParts * kBytes) {
    for (std::uint32_t h = 0; h < group; ++h) {
      const float* const own = q + std::size_t{h} * head_dim;
      alignas(kBytes) float rotated[kMaxBytesDim];
      __builtin_memcpy(rotated, own, head_dim * sizeof(float));
      rotate(rotated, head_dim);
      shifts[h] = mean_score(own, mean, head_dim, scale);
      pack(rotated, head_dim, scale, h);
    }
  }

 private:
  void pack(const float* q, std::uint32_t head_dim, float scale, std::uint32_t h) noexcept {
    Vec tops = Simd::set(0.f), all = Simd::set(0.f);
    __mmask16 others = 0;
    for (std::uint32_t c = 0; c < head_dim; c += kWidth) {
      const Vec x = Simd::mul(Simd::load(q + c), Simd::set(scale));
      others |= _mm512_cmp_ps_mask(Simd::abs(x), Simd::set(3e38f), _CMP_NLE_UQ);
      tops = Simd::max(tops, Simd::abs(x));
      all = Simd::add(all, x);
    }
    const float top = _mm512_reduce_max_ps(tops);
    exact &= others == 0 && (top == 0.f || top > 1e-30f);
    if (!exact) return;
    units[h] = top == 0.f ? 1.f : top / kLargest;
    sums[h] = _mm512_reduce_add_ps(all);
    for (std::uint32_t v = 0; v < vectors; ++v) {
      std::int8_t* const to = packed + h * stride + v * 2 * kParts * kBytes;
      for (std::uint32_t odd = 0; odd < 2; ++odd) pack(q + v * kWidth, scale / units[h], v, odd, to + odd * kBytes);
    }
  }
  /// Every other code of a vector of words. Byte j of a word is for code 2 * j + odd.
  void pack(const float* q, float inverse, std::uint32_t v, std::uint32_t odd, std::int8_t* to) const noexcept {
    const std::uint32_t left = words - v * kWidth;
    const auto valid = static_cast<__mmask16>(left < kWidth ? (1u << left) - 1 : 0xffffu);
    const __m512i half = _mm512_set1_epi32(64);
    const __m512i byte = _mm512_set1_epi32(255);
    __m512i parts[kParts] = {};
    for (std::uint32_t j = 0; j < 4; ++j) {
      const Vec x = _mm512_maskz_loadu_ps(valid, q + (2 * j + odd) * words);
      __m512i rest = _mm512_cvtps_epi32(Simd::mul(x, Simd::set(inverse)));
      for (std::uint32_t part = kParts; part-- > 0;) {  // Each in [-64, 63], but for what is left as the high one.
        const __m512i above = part == 0 ? _mm512_setzero_si512() : _mm512_srai_epi32(_mm512_add_epi32(rest, half), 7);
        const __m512i here = _mm512_sub_epi32(rest, _mm512_slli_epi32(above, 7));
        parts[part] = _mm512_or_si512(parts[part], _mm512_slli_epi32(_mm512_and_si512(here, byte), 8 * j));
        rest = above;
      }
    }
    for (std::uint32_t part = 0; part < kParts; ++part) _mm512_store_si512(to + part * 2 * kBytes, parts[part]);
  }
};

/// Products of kRows rows of codes with kHeads queries, in lanes that are not added up yet: sums[h * step + r].
template <std::uint32_t kHeads, std::uint32_t kRows, std::uint32_t kVectors>
inline void dot_bytes(const std::int8_t* q, const Int4ByteQueries& queries, const std::byte* const* codes, Vec* sums,
                      std::uint32_t step) noexcept {
  constexpr std::uint32_t kParts = Int4ByteQueries::kParts;
  __m512i dots[kHeads * kRows][kParts];
#pragma GCC unroll 16
  for (auto& dot : dots) {
#pragma GCC unroll 4
    for (__m512i& part : dot) part = _mm512_setzero_si512();
  }
  const __m512i nibbles = _mm512_set1_epi8(15);
#pragma GCC unroll 2
  for (std::uint32_t v = 0; v < kVectors; ++v, q += 2 * kParts * Int4ByteQueries::kBytes) {
    const std::uint32_t left = queries.words - v * kWidth;
    const std::uint32_t count = left < kWidth ? left : kWidth;
    __m512i even[kRows], odd[kRows];
#pragma GCC unroll 16
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const __m512i words = Simd::load_words(codes[r] + v * kWidth * 4, count);
      even[r] = _mm512_and_si512(words, nibbles);
      odd[r] = _mm512_and_si512(_mm512_srli_epi16(words, 4), nibbles);
    }
#pragma GCC unroll 16
    for (std::uint32_t h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (std::uint32_t part = 0; part < kParts; ++part) {
        const std::int8_t* const of = q + h * queries.stride + part * 2 * Int4ByteQueries::kBytes;
        const __m512i evens = _mm512_load_si512(of);
        const __m512i odds = _mm512_load_si512(of + Int4ByteQueries::kBytes);
#pragma GCC unroll 16
        for (std::uint32_t r = 0; r < kRows; ++r) {
          __m512i& dot = dots[h * kRows + r][part];
          dot = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(dot, even[r], evens), odd[r], odds);
        }
      }
    }
  }
  // A lane has 16 products of 15 * kLargest at most, which 32 bits hold.
#pragma GCC unroll 16
  for (std::uint32_t i = 0; i < kHeads * kRows; ++i) {
    __m512i sum = dots[i][0];
#pragma GCC unroll 4
    for (std::uint32_t part = 1; part < kParts; ++part)
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 7), dots[i][part]);
    sums[i / kRows * step + i % kRows] = _mm512_cvtepi32_ps(sum);
  }
}

/// kWidth rows with `H::kHeads` queries from `head` on: dots[h * kWidth + r].
template <class H, std::uint32_t kVectors>
inline void dot_tile(const Int4ByteQueries& queries, std::uint32_t head, const std::byte* const* codes,
                     float* dots) noexcept {
  constexpr std::uint32_t kAtOnce = 8 / H::kHeads;  // Their sums, kParts each, leave registers for codes and queries.
  const std::int8_t* const q = queries.packed + head * queries.stride;
  for (std::uint32_t r = 0; r < kWidth; r += H::kRows) {
    Vec sums[kWidth];
#pragma GCC unroll 16
    for (std::uint32_t i = 0; i < H::kRows; i += kAtOnce)
      dot_bytes<H::kHeads, kAtOnce, kVectors>(q, queries, codes + r + i, sums + i, H::kRows);
    alignas(64) float lanes[kWidth];
    Simd::store(lanes, Simd::sum_lanes(sums));
    for (std::uint32_t h = 0; h < H::kHeads; ++h)
      __builtin_memcpy(dots + h * kWidth + r, lanes + h * H::kRows, H::kRows * sizeof(float));
  }
}

/// Scale and zero of kWidth rows, whose f16 values lie in turn.
inline Pair unzip_params(const std::byte* halves) noexcept {
  const Vec first = Simd::load_as<DType::f16>(halves);
  const Vec second = Simd::load_as<DType::f16>(halves + kWidth * 2);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(first, even, second),
          _mm512_permutex2var_ps(first, _mm512_or_si512(even, _mm512_set1_epi32(1)), second)};
}

/// As score_int4, faster, of keys that are no longer than kMaxBytesDim.
void score_int4_bytes(const ScoreInt4Rows& args) noexcept {
  if (args.head_dim > kMaxBytesDim) return score_int4(args);
  const Int4ByteQueries queries(args.q, args.mean, args.group, args.head_dim, args.scale);
  if (!queries.exact) return score_int4(args);
  alignas(64) float dots[kMaxGroup * kWidth];
  for (std::uint32_t tile = 0; tile < args.count; tile += kWidth) {
    const Int4Tile lines(args, tile);
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      float* const to = dots + head * kWidth;
      queries.vectors == 1 ? dot_tile<H, 1>(queries, head, lines.codes, to)
                           : dot_tile<H, 2>(queries, head, lines.codes, to);
    });
    const auto [scales, zeros] = unzip_params(lines.halves);
    for (std::uint32_t h = 0; h < args.group; ++h) {
      const Vec dot = Simd::mul(Simd::load(dots + h * kWidth), Simd::set(queries.units[h]));
      const Vec score =
          Simd::fma(scales, dot, Simd::fma(zeros, Simd::set(queries.sums[h]), Simd::set(queries.shifts[h])));
      float* const out = args.out + tile * args.token_stride + h * args.head_stride;
      if (args.token_stride == 1 && lines.rows == kWidth) {
        Simd::store(out, score);
        continue;
      }
      alignas(64) float some[kWidth];
      Simd::store(some, score);
      for (std::uint32_t r = 0; r < lines.rows; ++r) out[r * args.token_stride] = some[r];
    }
  }
}

}  // namespace
}  // namespace sluice::cpu
