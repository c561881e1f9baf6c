#pragma once

#include "cpu/kernels/rows.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kCodesPerWord = 8;  ///< and of a unit, see CodeLayout

/// What was stored is read again from here on: else the compiler may make one operation of a product and a sum, which
/// rounds once.
inline void settle() noexcept { __asm__ __volatile__("" ::: "memory"); }
template <std::size_t kCount>
inline void settle(float (&values)[kCount]) noexcept {
  __asm__ __volatile__("" : "+m"(values));
}

/// The Hadamard rotation of a head in place, see CodeLayout; the same operations in the same order on every device.
inline void rotate(float* x, std::uint32_t head_dim) noexcept {
  const std::uint32_t block = rotation_block(head_dim);
  for (std::uint32_t apart = 1; apart < block; apart *= 2) {
    for (std::uint32_t first = 0; first < head_dim; first += 2 * apart) {
      for (std::uint32_t c = first; c < first + apart; ++c) {
        const float a = x[c];
        const float b = x[c + apart];
        x[c] = a + b;
        x[c + apart] = a - b;
      }
    }
  }
  const float scale = rotation_scale(block);
  for (std::uint32_t c = 0; c < head_dim; ++c) x[c] *= scale;
}

/// scale * q.m, which all tokens' estimates have.
inline float mean_score(const float* q, const float* mean, std::uint32_t head_dim, float scale) noexcept {
  double sum = 0.0;
  for (std::uint32_t c = 0; c < head_dim && mean != nullptr; ++c)
    sum += static_cast<double>(q[c]) * static_cast<double>(mean[c]);
  return static_cast<float>(sum * static_cast<double>(scale));
}

/// Scale and zero of one row, as f16 holds them; NaN if the row has one.
struct Int4Params {
  float scale, zero;
};

/// Minimum and maximum of a row without NaN.
struct Range {
  float least, most;
};
inline Range range_of(const float* row, std::uint32_t head_dim) noexcept {
  Vec low = Simd::load(row);
  Vec high = low;
  for (std::uint32_t c = kWidth; c < head_dim; c += kWidth) {
    low = Simd::min(Simd::load(row + c), low);
    high = Simd::max(Simd::load(row + c), high);
  }
  alignas(64) float lows[kWidth], highs[kWidth];
  Simd::store(lows, low);
  Simd::store(highs, high);
  for (std::uint32_t i = 1; i < kWidth; ++i) {
    lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];
    highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];
  }
  return {lows[0], highs[0]};
}

/// What code 0 of 3 bits stands for. Two products that are rounded by themselves: neither is too large for a float.
inline float lowest_of(float least, float most) noexcept {
  float parts[] = {least * (1.f - CodeLayout::kBeyond), most * CodeLayout::kBeyond};
  settle(parts);
  return parts[0] + parts[1];
}

inline Int4Params int4_params(const float* row, const CodeLayout& layout) noexcept {
  const std::uint32_t head_dim = layout.head_dim;
  std::uint32_t nan = 0;
  for (std::uint32_t c = 0; c < head_dim; ++c) {  // On integers, which vectorises.
    std::uint32_t bits = 0;
    __builtin_memcpy(&bits, row + c, sizeof bits);
    nan |= (bits & 0x7fff'ffffu) > 0x7f80'0000u ? 1u : 0u;
  }
  if (nan != 0) return {__builtin_nanf(""), __builtin_nanf("")};
  const auto [least, most] = range_of(row, head_dim);
  // The same operations in the same order on every device: the copies are equal bit by bit.
  float scale = (most - least) / layout.steps();
  scale = scale < CodeLayout::kSmallest ? CodeLayout::kSmallest : scale;
  scale = scale < CodeLayout::kLargest ? scale : CodeLayout::kLargest;
  float zero = layout.few() ? lowest_of(least, most) : least;
  zero = zero > -CodeLayout::kLargest ? zero : -CodeLayout::kLargest;
  zero = zero < CodeLayout::kLargest ? zero : CodeLayout::kLargest;
  return {scale, zero + 0.f};  // Which of two zeros is least is not defined; here it is +0.
}

/// Rounds to f16 and stores both; what was stored comes back.
inline Int4Params store_params(Int4Params params, std::byte* to) noexcept {
  std::byte narrow[kWidth * 2];
  Simd::store_as<DType::f16>(narrow, Simd::keep(1u, Simd::set(params.scale), Simd::set(params.zero)));
  __builtin_memcpy(to, narrow, CodeLayout::kParamBytes);
  alignas(64) float wide[kWidth];
  Simd::store(wide, Simd::load_as<DType::f16>(narrow));
  return {wide[0], wide[1]};
}

/// A row's units, as words of 4 bits each.
using Units = std::uint32_t[kMaxHeadDim / kCodesPerWord];

/// 3 bits of words of 4, and back. Of a unit, `ab` has bytes a and b, `c` byte c.
inline void narrow_units(const Units& words, std::uint32_t count, std::byte* ab, std::byte* c) noexcept {
  std::uint16_t pairs[kMaxHeadDim / kCodesPerWord];
  std::uint8_t thirds[kMaxHeadDim / kCodesPerWord];
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t x = words[i];
    const std::uint32_t ab_bits = (x & 0x0707u) | (x & 0x7070u) >> 1 | (x >> 24 & 3u) << 6 | (x >> 28 & 3u) << 14;
    pairs[i] = static_cast<std::uint16_t>(ab_bits);
    thirds[i] = static_cast<std::uint8_t>((x >> 16 & 0x77u) | (x >> 23 & 0x88u));
  }
  __builtin_memcpy(ab, pairs, count * sizeof *pairs);
  __builtin_memcpy(c, thirds, count);
}
inline void widen_units(const std::byte* ab, const std::byte* c, std::uint32_t count, Units& words) noexcept {
  std::uint16_t pairs[kMaxHeadDim / kCodesPerWord];
  std::uint8_t thirds[kMaxHeadDim / kCodesPerWord];
  __builtin_memcpy(pairs, ab, count * sizeof *pairs);
  __builtin_memcpy(thirds, c, count);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t x = pairs[i];
    const std::uint32_t y = thirds[i];
    words[i] = (x & 0x0707u) | (x & 0x3838u) << 1 | (y & 0x77u) << 16 | (x & 0xc0u) << 18 | (x & 0xc000u) << 14 |
               (y & 8u) << 23 | (y & 0x80u) << 23;
  }
}

/// As row `at` of a page's copy.
inline void store_codes(const float* row, Int4Params params, std::byte* copy, std::uint32_t at,
                        const CodeLayout& layout) noexcept {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const auto top = static_cast<float>(layout.levels());
  const std::uint32_t words = layout.units();
  const float inverse = params.scale == params.scale ? 1.f / params.scale : 0.f;
  Units packed = {};
  for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
    for (std::uint32_t w = 0; w < words; ++w) {
      float code = (row[n * words + w] - params.zero) * inverse;
      code = code > 0.f ? code : 0.f;  // NaN too
      code = (code < top ? code : top) + kRound;
      std::uint32_t bits = 0;
      __builtin_memcpy(&bits, &code, sizeof bits);
      packed[w] |= (bits & 15u) << (4 * n);
    }
  }
  std::byte* const to = copy + layout.codes_offset(at);
  if (layout.few()) return narrow_units(packed, words, to, copy + layout.thirds_offset(at));
  __builtin_memcpy(to, packed, words * sizeof *packed);
}

template <DType kType>
void make_codes(const CodesRows& args) noexcept {
  alignas(64) float row[kMaxHeadDim];
  const std::uint32_t head_dim = args.layout.head_dim;
  std::byte* const params = args.copy + args.layout.params_offset() + args.first * CodeLayout::kParamBytes;
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    const std::byte* const k = args.k + std::size_t{r} * head_dim * kElementBytes<kType>;
    for (std::uint32_t c = 0; c < head_dim; c += kWidth) {
      const Vec keys = Simd::load_as<kType>(k + c * kElementBytes<kType>);
      Simd::store(row + c, unfold<kType>(keys, args.scales, std::size_t{2} * r));
    }
    settle();
    for (std::uint32_t c = 0; c < head_dim && args.mean != nullptr; ++c) row[c] -= args.mean[c];
    rotate(row, head_dim);
    settle();
    const Int4Params stored = store_params(int4_params(row, args.layout), params + r * CodeLayout::kParamBytes);
    store_codes(row, stored, args.copy, args.first + r, args.layout);
  }
}

/// Rotated queries in the order in which vectors of codes come: [group][vectors of words][code of a word][kWidth],
/// padded with 0 where the last vector of words is not full. And the sums over the channels, and mean_score.
struct Int4Queries {
  alignas(64) float packed[kMaxGroup * kMaxHeadDim];
  float sums[kMaxGroup], shifts[kMaxGroup];
  std::uint32_t words, vectors, stride;

  Int4Queries(const float* q, const float* mean, std::uint32_t group, std::uint32_t head_dim, float scale) noexcept
      : words(head_dim / kCodesPerWord),
        vectors((words + kWidth - 1) / kWidth),
        stride(vectors * kWidth * kCodesPerWord) {
    for (std::uint32_t h = 0; h < group; ++h) {
      float* const to = packed + h * stride;
      for (std::uint32_t i = 0; i < stride; ++i) to[i] = 0.f;
      float rotated[kMaxHeadDim];
      __builtin_memcpy(rotated, q + std::size_t{h} * head_dim, head_dim * sizeof(float));
      rotate(rotated, head_dim);
      shifts[h] = mean_score(q + std::size_t{h} * head_dim, mean, head_dim, scale);
      double sum = 0.0;
      for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
        for (std::uint32_t w = 0; w < words; ++w) {
          const float x = rotated[n * words + w] * scale;
          to[(w / kWidth * kCodesPerWord + n) * kWidth + w % kWidth] = x;
          sum += static_cast<double>(x);
        }
      }
      sums[h] = static_cast<float>(sum);
    }
  }
};
static_assert((kMaxHeadDim / kCodesPerWord) % kWidth == 0 && 16 * kCodesPerWord <= kMaxHeadDim);

/// Products of kWidth / kHeads rows of codes with kHeads queries: lane r * kHeads + h is row r, head h.
template <std::uint32_t kHeads>
inline Vec dot_codes(const float* q, const Int4Queries& queries, const std::byte* const* codes) noexcept {
  constexpr std::uint32_t kRows = kWidth / kHeads;
  Vec sums[kWidth];
#pragma GCC unroll 16
  for (std::uint32_t i = 0; i < kWidth; ++i) sums[i] = Simd::set(0.f);
  for (std::uint32_t v = 0; v < queries.vectors; ++v, q += kWidth * kCodesPerWord) {
    const std::uint32_t left = queries.words - v * kWidth;
    const std::uint32_t count = left < kWidth ? left : kWidth;
    Simd::Words words[kRows];
#pragma GCC unroll 16
    for (std::uint32_t r = 0; r < kRows; ++r) words[r] = Simd::load_words(codes[r] + v * kWidth * 4, count);
    for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
#pragma GCC unroll 16
      for (std::uint32_t r = 0; r < kRows; ++r) {
        const Vec code = Simd::code(words[r], n);
#pragma GCC unroll 16
        for (std::uint32_t h = 0; h < kHeads; ++h) {
          Vec& sum = sums[r * kHeads + h];
          sum = Simd::fma(code, Simd::load(q + h * queries.stride + n * kWidth), sum);
        }
      }
    }
  }
  return Simd::sum_lanes(sums);
}

/// Where kWidth rows lie, scale and zero of each in turn as f16, on the way while those before are multiplied. What is
/// missing in the last tile repeats its last row. Codes of 3 bits are made words of 4 bits here, which is all that
/// products know.
struct Int4Tile {
  const std::byte* codes[kWidth];
  std::byte halves[2 * kWidth * 2];
  alignas(64) Units words[kWidth];
  std::uint32_t rows;

  Int4Tile(const ScoreInt4Rows& args, std::uint32_t tile) noexcept
      : rows(args.count - tile < kWidth ? args.count - tile : kWidth) {
    for (std::uint32_t r = 0; r < kWidth; ++r) {
      const std::uint32_t row = tile + (r < rows ? r : rows - 1);
      codes[r] = args.codes[row];
      if (args.thirds != nullptr) {
        widen_units(args.codes[row], args.thirds[row], args.head_dim / kCodesPerWord, words[r]);
        codes[r] = reinterpret_cast<const std::byte*>(words[r]);
      }
      __builtin_memcpy(halves + r * CodeLayout::kParamBytes, args.params[row], CodeLayout::kParamBytes);
      const std::uint32_t ahead = tile + r + 2 * kWidth;
      if (ahead >= args.count) continue;
      prefetch_row(args.codes[ahead], args.head_dim / (args.thirds == nullptr ? 2 : 4));
      if (args.thirds != nullptr) prefetch_row(args.thirds[ahead], args.head_dim / 8);
    }
    if (tile + 2 * kWidth < args.count) prefetch_line(args.params[tile + 2 * kWidth]);
  }
};

void score_int4(const ScoreInt4Rows& args) noexcept {
  const Int4Queries queries(args.q, args.mean, args.group, args.head_dim, args.scale);
  for (std::uint32_t tile = 0; tile < args.count; tile += kWidth) {
    const Int4Tile lines(args, tile);
    alignas(64) float params[2 * kWidth];  // scale, zero of every row
    Simd::store(params, Simd::load_as<DType::f16>(lines.halves));
    Simd::store(params + kWidth, Simd::load_as<DType::f16>(lines.halves + kWidth * 2));
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      for (std::uint32_t r = 0; r < lines.rows; r += H::kRows) {
        alignas(64) float dots[kWidth];
        Simd::store(dots, dot_codes<H::kHeads>(queries.packed + head * queries.stride, queries, lines.codes + r));
        for (std::uint32_t i = 0; i < H::kRows && r + i < lines.rows; ++i) {
          for (std::uint32_t h = 0; h < H::kHeads; ++h) {
            const float score =
                params[2 * (r + i)] * dots[i * H::kHeads + h] +
                (params[2 * (r + i) + 1] * queries.sums[head + h] + queries.shifts[head + h]);
            args.out[(tile + r + i) * args.token_stride + (head + h) * args.head_stride] = score;
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace sluice::cpu
