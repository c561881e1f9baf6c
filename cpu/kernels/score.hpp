#pragma once

#include "cpu/kernels/rows.hpp"

namespace sluice::cpu {
namespace {

/// K rows requested from memory before the one that is computed: at 256 bytes a row 8 KiB, several times what a
/// core has in flight.
constexpr std::uint32_t kScoreAhead = 32;

/// One vector of scores, lanes [row][head], to out[row, head0 + head] of a wider matrix.
template <std::uint32_t kHeads>
inline void scatter(Vec scores, std::uint32_t rows, std::uint32_t stride, float* out) noexcept {
  if (kHeads == stride && rows == kWidth / kHeads) return Simd::store(out, scores);
  alignas(64) float lanes[kWidth];
  Simd::store(lanes, scores);
  for (std::uint32_t r = 0; r < rows; ++r) {
    for (std::uint32_t h = 0; h < kHeads; ++h) out[r * stride + h] = lanes[r * kHeads + h];
  }
}

template <DType kType>
void score(const ScoreRows& args) noexcept {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];
  const Extent extent(args.head_dim);
  const std::uint32_t row_bytes = args.head_dim * kElementBytes<kType>;
  pack_queries<kType>(args.q, args.group, extent, args.scale, q);

  for (std::uint32_t i = 0; i < args.count && i < kScoreAhead; ++i) prefetch_row(args.k[i], row_bytes);
  [[maybe_unused]] float scales[kWidth];
  for (std::uint32_t tile = 0; tile < args.count; tile += kWidth) {
    // One vector's width of rows at a time; what is missing in the last repeats its last row.
    const std::uint32_t rows = args.count - tile < kWidth ? args.count - tile : kWidth;
    const std::uint32_t last = args.count - 1;
    const std::byte* k[kWidth];
    const std::byte* ahead[kWidth];
    for (std::uint32_t r = 0; r < kWidth; ++r) {
      k[r] = args.k[tile + r < last ? tile + r : last];
      ahead[r] = args.k[tile + r + kScoreAhead < last ? tile + r + kScoreAhead : last];
    }
    if constexpr (kScaled<kType>) {
      for (std::uint32_t r = 0; r < kWidth; ++r) {
        scales[r] = args.scales[tile + r < last ? tile + r : last][0];
        const std::uint32_t later = tile + r + kScoreAhead;
        if (later < args.count) prefetch_line(reinterpret_cast<const std::byte*>(args.scales[later]));
      }
    }
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      for (std::uint32_t r = 0; r < rows; r += H::kRows) {
        Vec scores =
            dot_rows<kType, H::kHeads>(q + head * extent.stride, {k + r, head == 0 ? ahead + r : nullptr}, extent);
        if constexpr (kScaled<kType>) scores = Simd::mul(scores, scale_lanes<H::kHeads>(scales + r));
        if (args.softcap != 0.f) scores = soft_cap(scores, args.softcap);
        const std::uint32_t valid = rows - r < H::kRows ? rows - r : H::kRows;
        scatter<H::kHeads>(scores, valid, args.group, args.out + std::size_t{tile + r} * args.group + head);
      }
    });
  }
}

}  // namespace
}  // namespace sluice::cpu
