#pragma once

#include "cpu/kernels/rows.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kCodesPerWord = 8;

/// What was stored is read again from here on: else the compiler may make one operation of a product and a sum, which
/// rounds once.
inline void settle() noexcept { __asm__ __volatile__("" ::: "memory"); }

/// The Hadamard rotation of a head in place, see Int4Layout; the same operations in the same order on every backend.
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

inline Int4Params int4_params(const float* row, std::uint32_t head_dim) noexcept {
  std::uint32_t nan = 0;
  for (std::uint32_t c = 0; c < head_dim; ++c) {  // On integers, which vectorises.
    std::uint32_t bits = 0;
    __builtin_memcpy(&bits, row + c, sizeof bits);
    nan |= (bits & 0x7fff'ffffu) > 0x7f80'0000u ? 1u : 0u;
  }
  if (nan != 0) return {__builtin_nanf(""), __builtin_nanf("")};
  const auto [least, most] = range_of(row, head_dim);
  // The same operations in the same order on every backend: the copies are equal bit by bit.
  float scale = (most - least) / static_cast<float>(Int4Layout::kLevels);
  scale = scale < Int4Layout::kSmallest ? Int4Layout::kSmallest : scale;
  scale = scale < Int4Layout::kLargest ? scale : Int4Layout::kLargest;
  float zero = least > -Int4Layout::kLargest ? least : -Int4Layout::kLargest;
  zero = zero < Int4Layout::kLargest ? zero : Int4Layout::kLargest;
  return {scale, zero + 0.f};  // Which of two zeros is least is not defined; here it is +0.
}

/// Rounds to f16 and stores both; what was stored comes back.
inline Int4Params store_params(Int4Params params, std::byte* to) noexcept {
  std::byte narrow[kWidth * 2];
  Simd::store_as<DType::f16>(narrow, Simd::keep(1u, Simd::set(params.scale), Simd::set(params.zero)));
  __builtin_memcpy(to, narrow, Int4Layout::kParamBytes);
  alignas(64) float wide[kWidth];
  Simd::store(wide, Simd::load_as<DType::f16>(narrow));
  return {wide[0], wide[1]};
}

inline void store_codes(const float* row, std::uint32_t head_dim, Int4Params params, std::byte* to) noexcept {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr auto kTop = static_cast<float>(Int4Layout::kLevels);
  const std::uint32_t words = head_dim / kCodesPerWord;
  const float inverse = params.scale == params.scale ? 1.f / params.scale : 0.f;
  std::uint32_t packed[kMaxHeadDim / kCodesPerWord] = {};
  for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
    for (std::uint32_t w = 0; w < words; ++w) {
      float code = (row[n * words + w] - params.zero) * inverse;
      code = code > 0.f ? code : 0.f;  // NaN too
      code = (code < kTop ? code : kTop) + kRound;
      std::uint32_t bits = 0;
      __builtin_memcpy(&bits, &code, sizeof bits);
      packed[w] |= (bits & 15u) << (4 * n);
    }
  }
  __builtin_memcpy(to, packed, words * sizeof(std::uint32_t));
}

template <DType kType>
void make_codes(const CodesRows& args) noexcept {
  alignas(64) float row[kMaxHeadDim];
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    const std::byte* const k = args.k + std::size_t{r} * args.head_dim * kElementBytes<kType>;
    for (std::uint32_t c = 0; c < args.head_dim; c += kWidth) {
      const Vec keys = Simd::load_as<kType>(k + c * kElementBytes<kType>);
      Simd::store(row + c, unfold<kType>(keys, args.scales, std::size_t{2} * r));
    }
    settle();
    for (std::uint32_t c = 0; c < args.head_dim && args.mean != nullptr; ++c) row[c] -= args.mean[c];
    rotate(row, args.head_dim);
    settle();
    const Int4Params params = store_params(int4_params(row, args.head_dim), args.params + r * Int4Layout::kParamBytes);
    store_codes(row, args.head_dim, params, args.codes + std::size_t{r} * (args.head_dim / 2));
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
/// missing in the last tile repeats its last row.
struct Int4Tile {
  const std::byte* codes[kWidth];
  std::byte halves[2 * kWidth * 2];
  std::uint32_t rows;

  Int4Tile(const ScoreInt4Rows& args, std::uint32_t tile) noexcept
      : rows(args.count - tile < kWidth ? args.count - tile : kWidth) {
    for (std::uint32_t r = 0; r < kWidth; ++r) {
      const std::uint32_t row = tile + (r < rows ? r : rows - 1);
      codes[r] = args.codes[row];
      __builtin_memcpy(halves + r * Int4Layout::kParamBytes, args.params[row], Int4Layout::kParamBytes);
      const std::uint32_t ahead = tile + r + 2 * kWidth;
      if (ahead < args.count) prefetch_row(args.codes[ahead], args.head_dim / 2);
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
