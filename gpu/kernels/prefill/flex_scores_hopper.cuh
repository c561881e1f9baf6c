#pragma once

#include <cmath>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/flex_tiles_hopper.cuh"
#include "gpu/kernels/wgmma.cuh"

/// Scores of a head's 128 representative rows by products of whole warpgroups (compute capability 9.0). Two warpgroups
/// have 64 rows each as registers, a warp of them 16, and score a tile of 64 keys at once. All walk over the same tiles
/// in shared memory, while the next ones' copies are under way; of several thread blocks on a multiprocessor, some keep
/// the tensor cores busy while others make weights.
namespace sluice::gpu::detail {

inline constexpr int kFlexHopperWarps = 8;
inline constexpr int kFlexHopperThreads = 32 * kFlexHopperWarps;
inline constexpr int kFlexWarpRows = 16;
/// Diagonals that a warp's ring holds. Warp w, whose rows are 16 w further on, adds to those that begin 112 - 16 w
/// behind a tile's first; a tile settles 64.
inline constexpr std::uint32_t kHopperRing = 256;
static_assert(kFlexRows == kFlexWarpRows * kFlexHopperWarps);

/// [4 n + 2 half + e] is (row 8 half + g, key 8 n + 2t + e) of a warp.
using HopperScores = float[32];

/// Dynamic shared memory begins at a multiple of 16, tiles at one of 1 KiB.
template <class Memory>
inline constexpr int kHopperBytesOf = sizeof(Memory) + 1024;
template <class Memory>
__device__ Memory& aligned_memory(void* shared) {
  const std::uint32_t padding = (1024 - shared_address(shared) % 1024) % 1024;
  return *reinterpret_cast<Memory*>(static_cast<std::byte*>(shared) + padding);
}

/// A warp's queries as A fragments.
template <int kDim>
using HopperQueries = std::uint32_t[kDim / 16][4];

template <int kDim>
__device__ void load_queries(HopperQueries<kDim>& queries, const FlexItem& item, std::uint32_t head) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto* const words = reinterpret_cast<const std::uint32_t*>(item.queries) + head * kFlexRows * (kDim / 2);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const std::uint32_t row = threadIdx.x / 32 * kFlexWarpRows + part % 2 * 8 + lane / 4;
      queries[step][part] = words[row * (kDim / 2) + 8 * step + part / 2 * 4 + lane % 4];
    }
  }
}

template <class T, int kDim>
__device__ void score_tile(HopperScores& scores, const HopperQueries<kDim>& queries, const HopperKeys<kDim>& tile) {
  const std::uint32_t keys = shared_address(tile.bytes);
  pin_registers(scores);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const std::uint32_t at = step / 4 * HopperKeys<kDim>::kSlabBytes + step % 4 * 32;
    multiply_rows<T>(scores, queries[step], describe_rows(keys + at), step != 0);
  }
  commit_products();
  wait_products<0>();
  pin_registers(scores);
}

/// Scores of keys behind a row's own become -infinity. `position` is that of the warp's first row.
__device__ inline void hide_later_keys(HopperScores& scores, std::uint32_t first_key, std::uint32_t position) {
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const std::uint32_t key = first_key + i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (key > position + i % 4 / 2 * 8 + lane / 4) scores[i] = -INFINITY;
  }
}

/// One thread block: a split of one head's keys.
struct HopperSplit {
  std::uint32_t head = 0;
  std::uint32_t index = 0;
  std::uint32_t begin = 0;
  std::uint32_t tiles = 0;
  std::uint32_t position = 0;  ///< of the warp's first row
  std::uint32_t least = 0;     ///< of the first row of all
  float scale = 0.f;

  __device__ HopperSplit(const FlexItem& item, const FlexArgs& args)
      : head(blockIdx.x % args.group),
        index(blockIdx.x / args.group),
        scale(args.score_scale * kLog2E) {
    if (index >= item.splits) return;
    begin = index * item.split_keys;
    tiles = (min(item.split_keys, item.keys - begin) + kFlexTile - 1) / kFlexTile;
    least = item.keys - item.rows;
    position = least + threadIdx.x / 32 * kFlexWarpRows;
  }
  [[nodiscard]] __device__ std::uint32_t first(std::uint32_t tile) const { return begin + tile * kFlexTile; }
  /// The tile's scores, behind a row's own key -infinity.
  template <class T, int kDim>
  __device__ void score(HopperScores& scores, const HopperQueries<kDim>& queries, const HopperKeys<kDim>& keys,
                        std::uint32_t tile) const {
    score_tile<T>(scores, queries, keys);
    if (first(tile) + kFlexTile > least + 1) hide_later_keys(scores, first(tile), position);
  }
};

/// One row's softmax as far as a lane has seen it, base 2.
struct HopperRow {
  float top = -INFINITY;
  float mass = 0.f;

  /// Adds the scores of one half of the lane's rows. Those that are no numbers, or infinite, count as if the key were
  /// not there; they show in the sum.
  __device__ void add(HopperScores& scores, int half, float scale) {
    Sum sum = sum_of(scores, half, scale);
    if (!(sum.mass < INFINITY)) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = scores[i / 2 * 4 + 2 * half + i % 2];
        score = score < INFINITY ? score : -INFINITY;
      }
      sum = sum_of(scores, half, scale);
    }
    mass = mass * sum.factor + sum.mass;
    top = sum.top;
  }
  __device__ void merge_lanes() {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other_top = __shfl_xor_sync(kAllLanes, top, step);
      const float other_mass = __shfl_xor_sync(kAllLanes, mass, step);
      const float both = fmaxf(top, other_top);
      if (both == -INFINITY) continue;
      mass = mass * exp2_fast(top - both) + other_mass * exp2_fast(other_top - both);
      top = both;
    }
  }

 private:
  struct Sum {
    float top;
    float factor;  ///< of what was summed up before
    float mass;
  };
  [[nodiscard]] __device__ Sum sum_of(const HopperScores& scores, int half, float scale) const {
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 16; ++i) most[i % 2] = fmaxf(most[i % 2], scores[i / 2 * 4 + 2 * half + i % 2]);
    Sum sum{.top = fmaxf(top, fmaxf(most[0], most[1]) * scale), .factor = 1.f, .mass = 0.f};
    const float base = sum.top == -INFINITY ? 0.f : sum.top;
    sum.factor = exp2_fast(top - base);
    float parts[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      parts[i % 2] += exp2_fast(fmaf(scores[i / 2 * 4 + 2 * half + i % 2], scale, -base));
    }
    sum.mass = parts[0] + parts[1];
    return sum;
  }
};

/// One step of a sum over lanes that differ in a bit: a lane goes on with one half of its values, the lane where
/// `bit` is set with the second, and gives the other half away.
template <int kHalf>
__device__ void halve(float (&out)[kHalf], const float (&values)[2 * kHalf], bool bit, int lane_mask) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float other = __shfl_xor_sync(kAllLanes, bit ? values[i] : values[kHalf + i], lane_mask);
    out[i] = (bit ? values[kHalf + i] : values[i]) + other;
  }
}

/// Sums over the warp's rows, by key: to[64], 8-byte aligned. Returns the sum of this lane's weights, which is no
/// number, or infinite, if one of them is.
__device__ inline float sum_columns(float* to, const HopperScores& weights) {
  const std::uint32_t lane = threadIdx.x % 32;
  float sums[16];
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    sums[i] = weights[i / 2 * 4 + i % 2] + weights[i / 2 * 4 + 2 + i % 2];
    all += sums[i];
  }
  float half[8];
  float quarter[4];
  float eighth[2];
  halve(half, sums, (lane & 16) != 0, 16);
  halve(quarter, half, (lane & 8) != 0, 8);
  halve(eighth, quarter, (lane & 4) != 0, 4);
  *reinterpret_cast<float2*>(to + 2 * lane) = make_float2(eighth[0], eighth[1]);  // Keys 8 g + 2 t and the next.
  return all;
}

/// Sums over the diagonals of a warp's weights, 64 per tile of keys.
///
/// 8x8 blocks with the same (row block - column block) = D are added up as they are: element (g, c) of their sum S[D]
/// belongs to the diagonal (row - key) = 8 D + g - c. With g < c that is one of the eight diagonals that begin at
/// 8 (D - 1), so U[D] = (S[D] where g >= c, else S[D + 1]) holds the diagonals 8 D + m, m = (g - c) mod 8, whole. They
/// run once around U[D], and are summed by lanes that hand each other rows 4, 2 and 1 further on the same diagonal.
/// A tile completes U[1] .. U[-6]. S[-7] stays open and is the next tile's S[1]; S[-6], complete, is its S[2].
struct HopperDiagonals {
  float last[2];  ///< S[-6]
  float open[2];  ///< S[-7]

  __device__ void clear() { last[0] = last[1] = open[0] = open[1] = 0.f; }

  /// Diagonal (row - key) = x of the tile, -48 <= x < 16, goes to ring[begin + 15 - x].
  __device__ void add(float (&ring)[kHopperRing], std::uint32_t begin, const HopperScores& weights) {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
    float sums[10][2];  // S[2] .. S[-7]
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[0][e] = last[e];
      sums[1][e] = open[e] + weights[2 + e];
#pragma unroll
      for (int n = 0; n < 7; ++n) sums[2 + n][e] = weights[4 * n + e] + weights[4 * (n + 1) + 2 + e];
      sums[9][e] = weights[4 * 7 + e];
      last[e] = sums[8][e];
      open[e] = sums[9][e];
    }
    float whole[16];  // [2 i + e]: U[1 - i]
#pragma unroll
    for (int i = 0; i < 16; ++i) whole[i] = 2 * t + i % 2 <= g ? sums[1 + i / 2][i % 2] : sums[i / 2][i % 2];
    around(ring, begin, whole, g, t);
  }

 private:
  __device__ static void around(float (&ring)[kHopperRing], std::uint32_t begin, const float (&whole)[16],
                                std::uint32_t g, std::uint32_t t) {
    float half[8];
    halve(half, whole, (g & 4) != 0, 16 + 2);  // Row g +- 4, column +- 4: the lane with t +- 2.
    const bool middle = (g & 2) != 0;
    float quarter[4];
    const auto two_on = static_cast<int>((g ^ 2) * 4 + (t + (middle ? 3 : 1)) % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_sync(kAllLanes, middle ? half[i] : half[4 + i], two_on);
      quarter[i] = (middle ? half[4 + i] : half[i]) + other;
    }
    // Even rows go on with the first two. One row further, a lane's first column is followed by its second, and that
    // by the next lane's first.
    const bool odd = g % 2 != 0;
    const std::uint32_t row = (g ^ 1) * 4;
    const float same = __shfl_sync(kAllLanes, odd ? quarter[1] : quarter[2], static_cast<int>(row + t));
    const float next =
        __shfl_sync(kAllLanes, odd ? quarter[0] : quarter[3], static_cast<int>(row + (t + (odd ? 3 : 1)) % 4));
    const std::uint32_t end = begin + 8 * g + 7;
    ring[(end - ((g - 2 * t) & 7)) % kHopperRing] = odd ? quarter[2] + next : quarter[0] + same;
    ring[(end - ((g - 2 * t - 1) & 7)) % kHopperRing] = odd ? quarter[3] + same : quarter[1] + next;
  }
};

/// Where a warp's diagonals of a tile begin.
__device__ inline std::uint32_t ring_begin(std::uint32_t tile) {
  return tile * kFlexTile + (kFlexRows - kFlexWarpRows) - threadIdx.x / 32 * kFlexWarpRows;
}

}  // namespace sluice::gpu::detail
