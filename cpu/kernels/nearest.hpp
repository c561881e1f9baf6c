#pragma once

#include "cpu/kernels/prefill.hpp"

namespace sluice::cpu {
namespace {

/// Lets the block's products with one tile of centroids compete with what each row has found so far.
inline void compete(const NearestRows& args, std::uint32_t tile, float* products, float* best) noexcept {
  const float* const half_norms = args.half_norms + std::size_t{tile} * kCentroidTile;
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    float* const row = products + std::size_t{r} * kCentroidTile;
    Vec top = Simd::set(best[r]);
    for (std::uint32_t j = 0; j < kCentroidTile; j += kWidth) {
      const Vec closeness = Simd::sub(Simd::load(row + j), Simd::load(half_norms + j));
      Simd::store(row + j, closeness);
      top = Simd::max(closeness, top);  // Keeps `top` if the other is NaN.
    }
    alignas(64) float lanes[kWidth];
    Simd::store(lanes, Simd::fold_max<1>(top));
    if (!(lanes[0] > best[r])) continue;
    best[r] = lanes[0];
    std::uint32_t j = 0;
    while (row[j] != lanes[0]) ++j;
    args.nearest[r] = tile * kCentroidTile + j;
  }
}

inline void nearest(const NearestRows& args) noexcept {
  float* const products = args.scratch;
  float* const best = products + std::size_t{args.rows} * kCentroidTile;
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    best[r] = -__builtin_inff();
    args.nearest[r] = 0;
  }
  for (std::uint32_t tile = 0; tile < args.tiles; ++tile) {
    for (std::size_t i = 0; i < std::size_t{args.rows} * kCentroidTile; ++i) products[i] = 0.f;
    multiply_add({.a = args.keys,
                  .b = args.centroids + std::size_t{tile} * args.head_dim * kCentroidTile,
                  .c = products,
                  .a_stride = args.head_dim,
                  .b_stride = kCentroidTile,
                  .c_stride = kCentroidTile,
                  .inner = args.head_dim},
                 args.rows, kCentroidTile);
    compete(args, tile, products, best);
  }
}

}  // namespace
}  // namespace sluice::cpu
