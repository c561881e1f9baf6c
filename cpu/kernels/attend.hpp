#pragma once

#include "cpu/kernels/rows.hpp"

namespace sluice::cpu {
namespace {

/// Rows between two looks at the running maximum. 16 rows of K and V at 256 bytes are 8 KiB: a small part of a
/// first-level cache, so V is still there when the weights are known.
constexpr std::uint32_t kTile = 16;
/// Rows requested from memory before the one that is computed: K while scores are computed, V while weights are
/// applied. As long as nothing is there yet a core only waits, and many requests keep the first rows waiting, too: with
/// tiles of 32 and 32 rows ahead fifteen threads that attend 64 rows at a time took a fifth longer on a Xeon.
constexpr std::uint32_t kAttendAhead = 24;
constexpr float kInfinity = __builtin_inff();

/// What one call keeps while it runs. Arrays of a block of heads start at its first head.
struct AttendState {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];    ///< packed
  alignas(64) float sum[kMaxGroup * kMaxHeadDim];  ///< weighted values, in the order of pairs
  alignas(64) float weight[kMaxGroup * kTile];     ///< scores, then weights: [row][head] in every block
  alignas(64) float top[kMaxGroup * kWidth];       ///< running maximum, repeated over the vector
  alignas(64) float mass[kMaxGroup * kWidth];      ///< running sum of weights, in parts over the vector
};

/// One tile: `rows` tokens. The lists repeat their last row up to a full tile.
struct Tile {
  const std::byte* k[kTile];
  const std::byte* ahead[kTile];  ///< kAttendAhead rows later
  std::uint32_t first = 0;
  std::uint32_t rows = 0;
};

inline void fill_tile(const AttendRows& args, std::uint32_t first, Tile& tile) noexcept {
  tile.first = first;
  tile.rows = args.count - first < kTile ? args.count - first : kTile;
  const std::uint32_t last = args.count - 1;
  for (std::uint32_t r = 0; r < kTile; ++r) {
    tile.k[r] = args.k[first + r < last ? first + r : last];
    tile.ahead[r] = args.k[first + r + kAttendAhead < last ? first + r + kAttendAhead : last];
  }
}

/// Of a tile, if its rows have some.
template <bool kHas>
struct TileScales {
  float k[kTile];
  float v[kTile];
};
template <>
struct TileScales<false> {};

/// Requests the scales of some rows, which lie in a line of their own, before those are computed: not of a whole tile
/// at once, for which a core has too few requests in flight.
inline void prefetch_scales(const AttendRows& args, std::uint32_t first, std::uint32_t rows) noexcept {
  for (std::uint32_t i = first; i < first + rows && i < args.count; ++i)
    prefetch_line(reinterpret_cast<const std::byte*>(args.scales[i]));
}

template <bool kHas>
inline void fill_scales(const AttendRows& args, std::uint32_t first, TileScales<kHas>& scales) noexcept {
  if constexpr (kHas) {
    const std::uint32_t last = args.count - 1;
    for (std::uint32_t r = 0; r < kTile; ++r) {
      const float* const of = args.scales[first + r < last ? first + r : last];
      scales.k[r] = of[0];
      scales.v[r] = of[1];
    }
  }
}

/// Which lanes of the vector of scores that starts at row r count: those of members and of rows that exist.
template <class H>
inline std::uint32_t lane_bits(const AttendRows& args, const Tile& tile, std::uint32_t r, std::uint32_t head) noexcept {
  constexpr std::uint32_t kAll = (1u << H::kHeads) - 1;
  std::uint32_t bits = 0;
  for (std::uint32_t i = 0; i < H::kRows && r + i < tile.rows; ++i) {
    const std::uint32_t members = args.members != nullptr ? args.members[tile.first + r + i] >> head : kAll;
    bits |= (members & kAll) << (i * H::kHeads);
  }
  return bits;
}

/// Scores of a tile that come with the call.
template <class H>
inline Vec given_scores(const AttendRows& args, const Tile& tile, std::uint32_t r, std::uint32_t head) noexcept {
  const float* const from = args.scores + std::size_t{tile.first + r} * args.group + head;
  if (r + H::kRows <= tile.rows) {
    if (H::kHeads == args.group) return Simd::load(from);
    if constexpr (H::kHeads == 4) return Simd::load_fours(from, args.group);
  }
  alignas(64) float lanes[kWidth];
  for (std::uint32_t i = 0; i < H::kRows; ++i) {
    for (std::uint32_t h = 0; h < H::kHeads; ++h) {
      lanes[i * H::kHeads + h] = r + i < tile.rows ? from[std::size_t{i} * args.group + h] : 0.f;
    }
  }
  return Simd::load(lanes);
}

/// What is added to the scores of a tile, of rows that are there.
template <class H>
inline Vec correction_lanes(const AttendRows& args, const Tile& tile, std::uint32_t r) noexcept {
  float rows[H::kRows];
  for (std::uint32_t i = 0; i < H::kRows; ++i)
    rows[i] = r + i < tile.rows ? args.corrections[tile.first + r + i] : 0.f;
  return scale_lanes<H::kHeads>(rows);
}

template <DType kType, class H>
inline void score_tile(const AttendRows& args, const Tile& tile, const TileScales<kScaled<kType>>& scales,
                       const Extent& extent, std::uint32_t head, AttendState& state) noexcept {
  for (std::uint32_t r = 0; r < tile.rows; r += H::kRows) {
    Vec scores = args.scores != nullptr
                     ? given_scores<H>(args, tile, r, head)
                     : dot_rows<kType, H::kHeads>(state.q + head * extent.stride,
                                                  {tile.k + r, head == 0 ? tile.ahead + r : nullptr}, extent);
    if constexpr (kScaled<kType>) {
      if (head == 0) prefetch_scales(args, tile.first + r + kAttendAhead, H::kRows);
      if (args.scores == nullptr) scores = Simd::mul(scores, scale_lanes<H::kHeads>(scales.k + r));
    }
    if (args.softcap != 0.f && args.scores == nullptr) scores = soft_cap(scores, args.softcap);
    if (args.corrections != nullptr) scores = Simd::add(scores, correction_lanes<H>(args, tile, r));
    if (args.members != nullptr || r + H::kRows > tile.rows) {
      scores = Simd::keep(lane_bits<H>(args, tile, r, head), scores, Simd::set(-kInfinity));
    }
    Simd::store(state.weight + head * kTile + r * H::kHeads, scores);
  }
}

/// Hands a tile's scores to the caller.
template <class H>
inline void show_tile(const AttendRows& args, const Tile& tile, std::uint32_t head, const AttendState& state) noexcept {
  const float* const from = state.weight + head * kTile;
  float* const to = args.seen + std::size_t{tile.first} * args.group + head;
  for (std::uint32_t r = 0; r < tile.rows; ++r) {
    for (std::uint32_t h = 0; h < H::kHeads; ++h) to[std::size_t{r} * args.group + h] = from[r * H::kHeads + h];
  }
}

/// Turns scores into weights relative to the new maximum. Returns what the old sums have to be scaled by.
template <class H>
inline Vec soften_tile(const Tile& tile, std::uint32_t head, AttendState& state) noexcept {
  float* const weight = state.weight + head * kTile;
  const std::uint32_t lanes = tile.rows * H::kHeads;
  const Vec old_top = Simd::load(state.top + head * kWidth);
  Vec top = old_top;
  for (std::uint32_t i = 0; i < lanes; i += kWidth) top = Simd::max(Simd::load(weight + i), top);
  top = Simd::fold_max<H::kHeads>(top);
  const Vec scale = exp_negative(Simd::sub(old_top, top));
  Vec mass = Simd::mul(Simd::load(state.mass + head * kWidth), scale);
  for (std::uint32_t i = 0; i < lanes; i += kWidth) {
    const Vec p = exp_negative(Simd::sub(Simd::load(weight + i), top));
    Simd::store(weight + i, p);
    mass = Simd::add(mass, p);
  }
  Simd::store(state.top + head * kWidth, top);
  Simd::store(state.mass + head * kWidth, mass);
  return scale;
}

/// Values with scales: what a weight is multiplied by is its row's scale, too.
template <class H>
inline void scale_weights(const Tile& tile, const TileScales<true>& scales, float* weight) noexcept {
  for (std::uint32_t r = 0; r < tile.rows; ++r) {
    for (std::uint32_t h = 0; h < H::kHeads; ++h) weight[r * H::kHeads + h] *= scales.v[r];
  }
}

/// The values of a tile, to be weighted and added for one block of heads.
struct Weighing {
  const Tile& tile;
  const Extent& extent;
  std::uint64_t v_offset;
  const float* weight;  ///< [rows][kHeads]
  const float* scale;   ///< [kHeads], for the sums so far
  float* sum;           ///< [kHeads, stride]
  bool first_block;     ///< the one that requests later rows
};

/// kPairs pairs of columns from `pair` on; each element of V is widened once for all heads of the block.
template <DType kType, class H, std::uint32_t kPairs, bool kHalf>
inline void weigh_columns(const Weighing& x, std::uint32_t pair) noexcept {
  constexpr std::uint32_t kVecs = 2 * kPairs;
  constexpr std::size_t kPairBytes = std::size_t{kPair} * kElementBytes<kType>;
  const std::size_t v_at = x.v_offset + pair * kPairBytes;
  float* const sum = x.sum + pair * kPair;
  Vec sums[H::kHeads][kVecs];
#pragma GCC unroll 4
  for (std::uint32_t h = 0; h < H::kHeads; ++h) {
#pragma GCC unroll 16
    for (std::uint32_t i = 0; i < kVecs; ++i) {
      sums[h][i] = Simd::mul(Simd::load(sum + h * x.extent.stride + i * kWidth), Simd::set(x.scale[h]));
    }
  }
  for (std::uint32_t r = 0; r < x.tile.rows; ++r) {
    Vec v[kVecs];
#pragma GCC unroll 8
    for (std::uint32_t i = 0; i < kPairs; ++i) {
      if (x.first_block) prefetch_pair<kType>(x.tile.ahead[r], v_at + i * kPairBytes);
      const Pair columns = load_part<kType, kHalf>(x.tile.k[r] + v_at + i * kPairBytes);
      v[2 * i] = columns.a;
      v[2 * i + 1] = columns.b;
    }
#pragma GCC unroll 4
    for (std::uint32_t h = 0; h < H::kHeads; ++h) {
      const Vec p = Simd::set(x.weight[r * H::kHeads + h]);
#pragma GCC unroll 16
      for (std::uint32_t i = 0; i < kVecs; ++i) sums[h][i] = Simd::fma(p, v[i], sums[h][i]);
    }
  }
#pragma GCC unroll 4
  for (std::uint32_t h = 0; h < H::kHeads; ++h) {
#pragma GCC unroll 16
    for (std::uint32_t i = 0; i < kVecs; ++i) Simd::store(sum + h * x.extent.stride + i * kWidth, sums[h][i]);
  }
}

/// All columns from `pair` on: as many at a time as there are registers for, then the rest.
template <DType kType, class H, std::uint32_t kPairs>
inline void weigh_tile(const Weighing& x, std::uint32_t pair) noexcept {
  for (; pair + kPairs <= x.extent.pairs; pair += kPairs) weigh_columns<kType, H, kPairs, false>(x, pair);
  if constexpr (kPairs > 1) {
    weigh_tile<kType, H, kPairs / 2>(x, pair);
  } else if (x.extent.half) {
    weigh_columns<kType, H, 1, true>(x, pair);
  }
}

template <DType kType>
inline void finish(const AttendRows& args, const Extent& extent, const AttendState& state) noexcept {
  for_each_block(args.group, [&](auto heads, std::uint32_t head) {
    using H = decltype(heads);
    alignas(64) float mass[kWidth];
    Simd::store(mass, Simd::fold_add<H::kHeads>(Simd::load(state.mass + head * kWidth)));
    for (std::uint32_t h = 0; h < H::kHeads; ++h) {
      const float* const sum = state.sum + (head + h) * extent.stride;
      float* const out = args.out + std::size_t{head + h} * args.head_dim;
      const bool empty = mass[h] == 0.f;
      const float scale = 1.f / mass[h];
      args.lse[head + h] = empty ? -kInfinity : state.top[head * kWidth + h] + __builtin_logf(mass[h]);
      if (empty) {
        for (std::uint32_t c = 0; c < args.head_dim; ++c) out[c] = 0.f;
      } else {
        for_each_place<kType>(extent, [=](std::uint32_t c, std::uint32_t place) { out[c] = sum[place] * scale; });
      }
    }
  });
}

template <DType kType>
void attend(const AttendRows& args) noexcept {
  AttendState state;
  const Extent extent(args.head_dim);
  if (args.scores == nullptr) pack_queries<kType>(args.q, args.group, extent, args.scale, state.q);
  for (std::uint32_t i = 0; i < args.group * extent.stride; ++i) state.sum[i] = 0.f;
  for (std::uint32_t i = 0; i < args.group * kWidth; ++i) {
    state.top[i] = kLowest;
    state.mass[i] = 0.f;
  }

  const std::uint32_t row_bytes = args.head_dim * kElementBytes<kType>;
  // Values are wanted last.
  const std::uint32_t first_rows = args.count < kAttendAhead ? args.count : kAttendAhead;
  for (std::uint32_t i = 0; i < first_rows && args.scores == nullptr; ++i) prefetch_row(args.k[i], row_bytes);
  for (std::uint32_t i = 0; i < first_rows; ++i) prefetch_row(args.k[i] + args.v_offset, row_bytes);
  if constexpr (kScaled<kType>) prefetch_scales(args, 0, kAttendAhead);
  Tile tile;
  TileScales<kScaled<kType>> scales;
  for (std::uint32_t first = 0; first < args.count; first += kTile) {
    fill_tile(args, first, tile);
    fill_scales(args, first, scales);
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      score_tile<kType, decltype(heads)>(args, tile, scales, extent, head, state);
      if (args.seen != nullptr) show_tile<decltype(heads)>(args, tile, head, state);
    });
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      constexpr std::uint32_t kPairs = Simd::kAccumulators / (2 * H::kHeads);
      alignas(64) float scale[kWidth];
      Simd::store(scale, soften_tile<H>(tile, head, state));
      if constexpr (kScaled<kType>) scale_weights<H>(tile, scales, state.weight + head * kTile);
      weigh_tile<kType, H, kPairs>({.tile = tile,
                                    .extent = extent,
                                    .v_offset = args.v_offset,
                                    .weight = state.weight + head * kTile,
                                    .scale = scale,
                                    .sum = state.sum + head * extent.stride,
                                    .first_block = head == 0},
                                   0);
    });
  }
  finish<kType>(args, extent, state);
}

}  // namespace
}  // namespace sluice::cpu
