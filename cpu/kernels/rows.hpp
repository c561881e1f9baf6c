#pragma once

// Included after one simd_*.hpp, once per translation unit; internal linkage for the reason given there.

#include <cstddef>
#include <cstdint>
#include <numbers>

#include "cpu/kernels/kernels.hpp"

namespace sluice::cpu {
namespace {

using Vec = Simd::Vec;
using Pair = Simd::Pair;
constexpr std::uint32_t kWidth = Simd::kWidth;
constexpr std::uint32_t kPair = 2 * kWidth;
/// Below every score that counts, and finite: (-inf) - (-inf) would be NaN.
constexpr float kLowest = -3.402823466e38f;

/// Query heads that are computed together, and the K rows that fill a vector of scores with them: lane
/// r * kHeads + h is row r, head h.
template <std::uint32_t kCount>
struct Heads {
  static constexpr std::uint32_t kHeads = kCount;
  static constexpr std::uint32_t kRows = kWidth / kCount;
};

/// f(Heads<n>, first head) for blocks of four heads, then of two and one: four heads share one load of a row
/// without running out of registers.
template <class F>
inline void for_each_block(std::uint32_t group, F&& f) {
  std::uint32_t head = 0;
  for (; head + 4 <= group; head += 4) f(Heads<4>{}, head);
  if (group % 4 >= 2) {
    f(Heads<2>{}, head);
    head += 2;
  }
  if (group % 2 == 1) f(Heads<1>{}, head);
}

template <DType kType>
constexpr std::uint32_t kElementBytes = bytes_of(kType);

/// Whether rows have a scale each, which their elements are to be multiplied by.
template <DType kType>
constexpr bool kScaled = kType == DType::fp8_e4m3;
/// What is made of rows to stay with them, such as digests.
template <DType kType>
constexpr DType kMadeType = kScaled<kType> ? DType::bf16 : kType;

/// `v` of a row whose scale is scales[at].
template <DType kType>
inline Vec unfold(Vec v, const float* scales, std::size_t at) noexcept {
  if constexpr (kScaled<kType>) return Simd::mul(v, Simd::set(scales[at]));
  return v;
}

/// Scales of rows, one for each lane of a vector of scores: lane r * kHeads + h is row r's.
template <std::uint32_t kHeads>
inline Vec scale_lanes(const float* scales) noexcept {
  alignas(64) float lanes[kWidth];
  for (std::uint32_t i = 0; i < kWidth; ++i) lanes[i] = scales[i / kHeads];
  return Simd::load(lanes);
}

/// A row as pairs of vectors; with 16-float vectors the last pair may be half filled.
struct Extent {
  explicit Extent(std::uint32_t dim) noexcept
      : head_dim(dim), pairs(dim / kPair), half(dim % kPair != 0), stride((pairs + (half ? 1u : 0u)) * kPair) {}
  std::uint32_t head_dim;
  std::uint32_t pairs;  ///< whole ones
  bool half;
  std::uint32_t stride;  ///< floats of a row that is laid out in pairs
};

/// Calls f(element, place) for all elements of a row, where `place` is the element's index when the row is laid
/// out as Simd::load_pair yields it. Loops of fixed length, so that copies between the two vectorise.
template <DType kType, class F>
inline void for_each_place(const Extent& extent, F&& f) noexcept {
  if constexpr (kType == DType::bf16) {
    std::uint32_t begin = 0;
    for (; begin + kPair <= extent.head_dim; begin += kPair) {
      for (std::uint32_t i = 0; i < kWidth; ++i) f(begin + 2 * i, begin + i);
      for (std::uint32_t i = 0; i < kWidth; ++i) f(begin + 2 * i + 1, begin + kWidth + i);
    }
    for (std::uint32_t i = 0; i < kWidth / 2 && extent.half; ++i) {
      f(begin + 2 * i, begin + i);
      f(begin + 2 * i + 1, begin + kWidth + i);
    }
  } else {
    for (std::uint32_t c = 0; c < extent.head_dim; ++c) f(c, c);
  }
}

/// Queries in the order of pairs, times `scale`; the rest of a half pair is 0.
template <DType kType>
inline void pack_queries(const float* q, std::uint32_t group, const Extent& extent, float scale,
                         float* packed) noexcept {
  for (std::uint32_t h = 0; h < group; ++h) {
    const float* const from = q + h * extent.head_dim;
    float* const to = packed + h * extent.stride;
    for (std::uint32_t c = extent.pairs * kPair; c < extent.stride; ++c) to[c] = 0.f;
    for_each_place<kType>(extent, [=](std::uint32_t c, std::uint32_t place) { to[place] = from[c] * scale; });
  }
}

/// Requests a line. For the first-level cache: from the second every line would be fetched once more, and what waits
/// for that is one of the few misses that a core has in flight.
inline void prefetch_line(const std::byte* p) noexcept { __builtin_prefetch(p, 0, 3); }

inline void prefetch_row(const std::byte* row, std::uint32_t bytes) noexcept {
  for (std::uint32_t at = 0; at < bytes; at += 64) prefetch_line(row + at);
}

/// The lines that begin within one pair of columns: called for every pair, it spreads the requests for a row
/// evenly over the arithmetic.
template <DType kType>
inline void prefetch_pair(const std::byte* row, std::size_t at_bytes) noexcept {
  constexpr std::uint32_t kBytes = kPair * kElementBytes<kType>;
  if constexpr (kBytes >= 64) {
    for (std::uint32_t i = 0; i < kBytes; i += 64) prefetch_line(row + at_bytes + i);
  } else {
    if (at_bytes % 64 == 0) prefetch_line(row + at_bytes);
  }
}

template <DType kType, bool kHalf>
inline Pair load_part(const std::byte* p) noexcept {
  if constexpr (kHalf) return Simd::load_half<kType>(p);
  return Simd::load_pair<kType>(p);
}

/// K rows to multiply, and as many later ones to request from memory meanwhile; null if none.
struct Rows {
  const std::byte* const* now = nullptr;
  const std::byte* const* ahead = nullptr;
};

/// Adds the products of one pair of every row with every head. The operand with fewer vectors stays in
/// registers, the other streams by.
template <DType kType, std::uint32_t kHeads, bool kHalf>
inline void dot_pair(Vec (&sums)[kWidth], const float* q, std::uint32_t q_stride, const Rows& k_rows,
                     std::size_t at_bytes) noexcept {
  constexpr std::uint32_t kRows = kWidth / kHeads;
  const std::byte* const* const rows = k_rows.now;
  if (k_rows.ahead != nullptr) {
#pragma GCC unroll 16
    for (std::uint32_t r = 0; r < kRows; ++r) prefetch_pair<kType>(k_rows.ahead[r], at_bytes);
  }
  if constexpr (kRows > kHeads) {
#pragma GCC unroll 16
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const Pair k = load_part<kType, kHalf>(rows[r] + at_bytes);
#pragma GCC unroll 16
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        Vec& sum = sums[r * kHeads + h];
        sum = Simd::fma(k.a, Simd::load(q + h * q_stride), sum);
        sum = Simd::fma(k.b, Simd::load(q + h * q_stride + kWidth), sum);
      }
    }
  } else {
    Pair k[kRows];
#pragma GCC unroll 16
    for (std::uint32_t r = 0; r < kRows; ++r) k[r] = load_part<kType, kHalf>(rows[r] + at_bytes);
#pragma GCC unroll 16
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const Vec a = Simd::load(q + h * q_stride);
      const Vec b = Simd::load(q + h * q_stride + kWidth);
#pragma GCC unroll 16
      for (std::uint32_t r = 0; r < kRows; ++r) {
        Vec& sum = sums[r * kHeads + h];
        sum = Simd::fma(k[r].a, a, sum);
        sum = Simd::fma(k[r].b, b, sum);
      }
    }
  }
}

/// Scores of Heads<kHeads>::kRows rows with kHeads packed queries, as one vector.
template <DType kType, std::uint32_t kHeads>
inline Vec dot_rows(const float* q, const Rows& rows, const Extent& extent) noexcept {
  Vec sums[kWidth];
#pragma GCC unroll 16
  for (std::uint32_t i = 0; i < kWidth; ++i) sums[i] = Simd::set(0.f);
  for (std::uint32_t pair = 0; pair < extent.pairs; ++pair) {
    dot_pair<kType, kHeads, false>(sums, q + pair * kPair, extent.stride, rows,
                                   std::size_t{pair} * kPair * kElementBytes<kType>);
  }
  if (extent.half) {
    dot_pair<kType, kHeads, true>(sums, q + extent.pairs * kPair, extent.stride, rows,
                                  std::size_t{extent.pairs} * kPair * kElementBytes<kType>);
  }
  return Simd::sum_lanes(sums);
}

/// e^x for x <= 0, to 2e-7 relative; 0 below -87, where the result would become subnormal. NaN stays NaN.
inline Vec exp_negative(Vec x) noexcept {
  const Vec y = Simd::max(Simd::set(-87.f), x);
  const Vec k = Simd::round(Simd::mul(y, Simd::set(std::numbers::log2e_v<float>)));
  // ln 2 in two parts; the first has 9 bits, so that its product with a small integer is exact.
  Vec r = Simd::fma(k, Simd::set(-0.693359375f), y);
  r = Simd::fma(k, Simd::set(2.12194440e-4f), r);
  Vec p = Simd::set(1.f / 720.f);
  p = Simd::fma(p, r, Simd::set(1.f / 120.f));
  p = Simd::fma(p, r, Simd::set(1.f / 24.f));
  p = Simd::fma(p, r, Simd::set(1.f / 6.f));
  p = Simd::fma(p, r, Simd::set(0.5f));
  p = Simd::fma(p, r, Simd::set(1.f));
  p = Simd::fma(p, r, Simd::set(1.f));
  return Simd::zero_below(x, -87.f, Simd::scale(p, k));
}

/// cap * tanh(x / cap), to 1e-6 of the cap; NaN stays NaN. Never inlined: kernels without a cap are to stay as they
/// are.
[[gnu::noinline]] Vec soft_cap(Vec x, float cap) noexcept {
  // tanh|y| = (1 - e^(-2|y|)) / (1 + e^(-2|y|))
  alignas(64) float lanes[kWidth];
  Simd::store(lanes, exp_negative(Simd::mul(Simd::abs(x), Simd::set(-2.f / cap))));
  for (std::uint32_t i = 0; i < kWidth; ++i) lanes[i] = cap * (1.f - lanes[i]) / (1.f + lanes[i]);
  const Vec size = Simd::load(lanes);
  return Simd::by_sign(x, size, Simd::sub(Simd::set(0.f), size));
}

}  // namespace
}  // namespace sluice::cpu
