#pragma once

#include "cpu/kernels/rows.hpp"

namespace sluice::cpu {
namespace {

/// Rows between two looks at the running maximum. 32 rows of K and V at 256 bytes are 16 KiB: half of a
/// first-level cache, so V is still there when the weights are known.
constexpr std::uint32_t kTile = 32;
/// Rows requested from memory before the one that is computed.
constexpr std::uint32_t kAttendAhead = 32;
/// Below every score that counts, and finite: (-inf) - (-inf) would be NaN.
constexpr float kLowest = -3.402823466e38f;
constexpr float kInfinity = __builtin_inff();

/// What one call keeps while it runs. Arrays of a block of heads start at its first head.
struct AttendState {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];    ///< packed
  alignas(64) float sum[kMaxGroup * kMaxHeadDim];  ///< weighted values, in the order of pairs
  alignas(64) float weight[kMaxGroup * kTile];     ///< scores, then weights: [row][head] in every block
  alignas(64) float top[kMaxGroup * kWidth];       ///< running maximum, repeated over the vector
  alignas(64) float mass[kMaxGroup * kWidth];      ///< running sum of weights, in parts over the vector
};

/// One tile: `rows` tokens, their K rows repeated at the end up to a full vector.
struct Tile {
  const std::byte* k[kTile];
  std::uint32_t first = 0;
  std::uint32_t rows = 0;
};

inline void fill_tile(const AttendRows& args, std::uint32_t first, Tile& tile) noexcept {
  tile.first = first;
  tile.rows = args.count - first < kTile ? args.count - first : kTile;
  for (std::uint32_t r = 0; r < tile.rows; ++r) tile.k[r] = args.k[first + r];
  for (std::uint32_t r = tile.rows; r < kTile; ++r) tile.k[r] = tile.k[tile.rows - 1];
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
  if (H::kHeads == args.group && r + H::kRows <= tile.rows) return Simd::load(from);
  alignas(64) float lanes[kWidth];
  for (std::uint32_t i = 0; i < H::kRows; ++i) {
    for (std::uint32_t h = 0; h < H::kHeads; ++h) {
      lanes[i * H::kHeads + h] = r + i < tile.rows ? from[std::size_t{i} * args.group + h] : 0.f;
    }
  }
  return Simd::load(lanes);
}

template <DType kType, class H>
inline void score_tile(const AttendRows& args, const Tile& tile, const Extent& extent, std::uint32_t head,
                       AttendState& state) noexcept {
  const std::uint32_t row_bytes = args.head_dim * kElementBytes<kType>;
  for (std::uint32_t r = 0; r < tile.rows; r += H::kRows) {
    Vec scores;
    if (args.scores != nullptr) {
      scores = given_scores<H>(args, tile, r, head);
    } else {
      for (std::uint32_t i = 0; head == 0 && i < H::kRows; ++i) {
        const std::uint32_t ahead = tile.first + r + i + kAttendAhead;
        if (ahead >= args.count) break;
        prefetch_row(args.k[ahead], row_bytes);
        prefetch_row(args.k[ahead] + args.v_offset, row_bytes);
      }
      scores = dot_rows<kType, H::kHeads>(state.q + head * extent.stride, tile.k + r, extent);
    }
    if (args.members != nullptr || r + H::kRows > tile.rows) {
      scores = Simd::keep(lane_bits<H>(args, tile, r, head), scores, Simd::set(-kInfinity));
    }
    Simd::store(state.weight + head * kTile + r * H::kHeads, scores);
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

/// Adds the weighted values of a tile, kPairs pairs of columns at a time, each V element widened once.
template <DType kType, class H, std::uint32_t kPairs, bool kHalf>
inline void weigh_columns(const Tile& tile, const float* weight, const float* scale, const Extent& extent,
                          std::uint64_t v_at, float* sum) noexcept {
  Vec sums[H::kHeads][2 * kPairs];
#pragma GCC unroll 4
  for (std::uint32_t h = 0; h < H::kHeads; ++h) {
#pragma GCC unroll 16
    for (std::uint32_t i = 0; i < 2 * kPairs; ++i) {
      sums[h][i] = Simd::mul(Simd::load(sum + h * extent.stride + i * kWidth), Simd::set(scale[h]));
    }
  }
  for (std::uint32_t r = 0; r < tile.rows; ++r) {
    Vec v[2 * kPairs];
#pragma GCC unroll 8
    for (std::uint32_t i = 0; i < kPairs; ++i) {
      const Pair pair = load_part<kType, kHalf>(tile.k[r] + v_at + std::size_t{i} * kPair * kElementBytes<kType>);
      v[2 * i] = pair.a;
      v[2 * i + 1] = pair.b;
    }
#pragma GCC unroll 4
    for (std::uint32_t h = 0; h < H::kHeads; ++h) {
      const Vec p = Simd::set(weight[r * H::kHeads + h]);
#pragma GCC unroll 16
      for (std::uint32_t i = 0; i < 2 * kPairs; ++i) sums[h][i] = Simd::fma(p, v[i], sums[h][i]);
    }
  }
#pragma GCC unroll 4
  for (std::uint32_t h = 0; h < H::kHeads; ++h) {
#pragma GCC unroll 16
    for (std::uint32_t i = 0; i < 2 * kPairs; ++i) Simd::store(sum + h * extent.stride + i * kWidth, sums[h][i]);
  }
}

template <DType kType, class H, std::uint32_t kPairs>
inline void weigh_tile(const Tile& tile, const float* weight, const float* scale, const Extent& extent,
                       std::uint64_t v_offset, float* sum, std::uint32_t pair) noexcept {
  constexpr std::size_t kPairBytes = std::size_t{kPair} * kElementBytes<kType>;
  for (; pair + kPairs <= extent.pairs; pair += kPairs) {
    weigh_columns<kType, H, kPairs, false>(tile, weight, scale, extent, v_offset + pair * kPairBytes, sum + pair * kPair);
  }
  if constexpr (kPairs > 1) {
    weigh_tile<kType, H, kPairs / 2>(tile, weight, scale, extent, v_offset, sum, pair);
  } else if (extent.half) {
    weigh_columns<kType, H, 1, true>(tile, weight, scale, extent, v_offset + pair * kPairBytes, sum + pair * kPair);
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
  if (args.scores == nullptr) pack_queries<kType>(args.q, args.group, extent, inverse_sqrt(args.head_dim), state.q);
  for (std::uint32_t i = 0; i < args.group * extent.stride; ++i) state.sum[i] = 0.f;
  for (std::uint32_t i = 0; i < args.group * kWidth; ++i) {
    state.top[i] = kLowest;
    state.mass[i] = 0.f;
  }

  const std::uint32_t row_bytes = args.head_dim * kElementBytes<kType>;
  for (std::uint32_t i = 0; i < args.count && i < kAttendAhead; ++i) {
    if (args.scores == nullptr) prefetch_row(args.k[i], row_bytes);
    prefetch_row(args.k[i] + args.v_offset, row_bytes);
  }
  Tile tile;
  for (std::uint32_t first = 0; first < args.count; first += kTile) {
    fill_tile(args, first, tile);
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      score_tile<kType, decltype(heads)>(args, tile, extent, head, state);
    });
    for_each_block(args.group, [&](auto heads, std::uint32_t head) {
      using H = decltype(heads);
      constexpr std::uint32_t kPairs = Simd::kAccumulators / (2 * H::kHeads);
      alignas(64) float scale[kWidth];
      Simd::store(scale, soften_tile<H>(tile, head, state));
      weigh_tile<kType, H, kPairs>(tile, state.weight + head * kTile, scale, extent, args.v_offset,
                                   state.sum + head * extent.stride, 0);
    });
    // With given scores nothing was requested while K was read.
    for (std::uint32_t r = 0; args.scores != nullptr && r < kTile; ++r) {
      const std::uint32_t ahead = first + kAttendAhead + r;
      if (ahead < args.count) prefetch_row(args.k[ahead] + args.v_offset, row_bytes);
    }
  }
  finish<kType>(args, extent, state);
}

}  // namespace
}  // namespace sluice::cpu
