#pragma once

#include "cpu/kernels/rows.hpp"
#include "cpu/kernels/score.hpp"

namespace sluice::cpu {
namespace {

/// Digests requested from memory before the one that is scored.
constexpr std::uint32_t kDigestAhead = 16;

/// Adds one pair of columns of the digests of kWidth / kHeads pages. Of q*hi and q*lo the larger is the one
/// with hi where q is positive and with lo where it is negative.
template <DType kType, std::uint32_t kHeads, bool kHalf>
inline void digest_pair(Vec (&sums)[kWidth], const float* q, std::uint32_t q_stride, const std::byte* const* digests,
                        std::size_t hi_at, std::size_t lo_at) noexcept {
#pragma GCC unroll 16
  for (std::uint32_t r = 0; r < kWidth / kHeads; ++r) {
    const Pair hi = load_part<kType, kHalf>(digests[r] + hi_at);
    const Pair lo = load_part<kType, kHalf>(digests[r] + lo_at);
#pragma GCC unroll 16
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const Vec a = Simd::load(q + h * q_stride);
      const Vec b = Simd::load(q + h * q_stride + kWidth);
      Vec& sum = sums[r * kHeads + h];
      sum = Simd::fma(a, Simd::by_sign(a, hi.a, lo.a), sum);
      sum = Simd::fma(b, Simd::by_sign(b, hi.b, lo.b), sum);
    }
  }
}

template <DType kType, std::uint32_t kHeads>
inline Vec digest_scores(const float* q, const std::byte* const* digests, const Extent& extent) noexcept {
  const std::size_t lo = std::size_t{extent.head_dim} * kElementBytes<kType>;
  Vec sums[kWidth];
#pragma GCC unroll 16
  for (std::uint32_t i = 0; i < kWidth; ++i) sums[i] = Simd::set(0.f);
  for (std::uint32_t pair = 0; pair < extent.pairs; ++pair) {
    const std::size_t at = std::size_t{pair} * kPair * kElementBytes<kType>;
    digest_pair<kType, kHeads, false>(sums, q + pair * kPair, extent.stride, digests, at, lo + at);
  }
  if (extent.half) {
    const std::size_t at = std::size_t{extent.pairs} * kPair * kElementBytes<kType>;
    digest_pair<kType, kHeads, true>(sums, q + extent.pairs * kPair, extent.stride, digests, at, lo + at);
  }
  return Simd::sum_lanes(sums);
}

template <DType kType>
void score_digests(const ScoreDigests& args) noexcept {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];
  const Extent extent(args.head_dim);
  const std::size_t digest_bytes = std::size_t{2} * args.head_dim * kElementBytes<kType>;
  pack_queries<kType>(args.q, args.group, extent, 1.f, q);
  const auto digest = [&](std::uint32_t i) { return args.digests + args.frames[i] * digest_bytes; };

  for (std::uint32_t tile = 0; tile < args.count; tile += kWidth) {
    const std::uint32_t pages = args.count - tile < kWidth ? args.count - tile : kWidth;
    const std::byte* digests[kWidth];
    for (std::uint32_t p = 0; p < kWidth; ++p) {
      digests[p] = digest(tile + (p < pages ? p : pages - 1));
      const std::uint32_t ahead = tile + p + kDigestAhead;
      if (ahead < args.count) prefetch_row(digest(ahead), static_cast<std::uint32_t>(digest_bytes));
    }
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      for (std::uint32_t p = 0; p < pages; p += H::kRows) {
        alignas(64) float lanes[kWidth];
        Simd::store(lanes, digest_scores<kType, H::kHeads>(q + head * extent.stride, digests + p, extent));
        for (std::uint32_t h = 0; h < H::kHeads; ++h) {
          float* const out = args.out + (head + h) * args.out_stride + tile + p;
          for (std::uint32_t i = 0; i < H::kRows && p + i < pages; ++i) out[i] = lanes[i * H::kHeads + h];
        }
      }
    });
  }
}

struct Box {
  Vec hi, lo;
};

/// kWidth columns of one row.
template <DType kType>
inline Vec columns_of(const DigestRows& args, std::uint32_t column, std::uint32_t row) noexcept {
  const std::size_t at = std::size_t{row} * args.head_dim + column;
  return unfold<kType>(Simd::load_as<kType>(args.k + at * kElementBytes<kType>), args.scales, std::size_t{2} * row);
}

/// Maximum and minimum of kWidth columns. The second operand of max and min wins over NaN.
template <DType kType>
inline Box column_box(const DigestRows& args, std::uint32_t column) noexcept {
  const Vec first = columns_of<kType>(args, column, 0);
  Box box{first, first};
  for (std::uint32_t r = 1; r < args.rows; ++r) {
    const Vec k = columns_of<kType>(args, column, r);
    box = {Simd::max(k, box.hi), Simd::min(k, box.lo)};
  }
  return box;
}

template <DType kType>
inline void store_box(const DigestRows& args, std::uint32_t column, Vec hi, Vec lo) noexcept {
  constexpr DType kMade = kMadeType<kType>;
  Simd::store_as<kMade>(args.out + std::size_t{column} * kElementBytes<kMade>, hi);
  Simd::store_as<kMade>(args.out + (std::size_t{args.head_dim} + column) * kElementBytes<kMade>, lo);
}

template <DType kType>
void digest_box(const DigestRows& args) noexcept {
  for (std::uint32_t column = 0; column < args.head_dim; column += kWidth) {
    const Box box = column_box<kType>(args, column);
    store_box<kType>(args, column, box.hi, box.lo);
  }
}

/// Centre of the box +- mean distance from it (ArkVale, eq. 4). The limits keep rounding inside the box.
template <DType kType>
void digest_cuboid_mean(const DigestRows& args) noexcept {
  for (std::uint32_t column = 0; column < args.head_dim; column += kWidth) {
    const Box box = column_box<kType>(args, column);
    const Vec half = Simd::set(0.5f);
    const Vec centre = Simd::fma(box.hi, half, Simd::mul(box.lo, half));
    Vec distance = Simd::set(0.f);
    for (std::uint32_t r = 0; r < args.rows; ++r)
      distance = Simd::add(distance, Simd::abs(Simd::sub(columns_of<kType>(args, column, r), centre)));
    const Vec radius = Simd::mul(distance, Simd::set(1.f / static_cast<float>(args.rows)));
    store_box<kType>(args, column, Simd::min(Simd::add(centre, radius), box.hi),
                     Simd::max(Simd::sub(centre, radius), box.lo));
  }
}

}  // namespace
}  // namespace sluice::cpu
