#pragma once

#include <cmath>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/flex.hpp"

/// Scores of a head's 128 representative rows, by tensor cores. A warp keeps 32 rows of queries in registers as two row
/// tiles of the products, and takes 32 keys at a time: four row blocks by four column blocks of 8x8 scores. All warps
/// walk over the same tiles of 64 keys in shared memory, which the next tile's copies overlap. Thread blocks of a
/// group's heads follow each other in the grid, so that they find their keys in the L2 cache.
namespace sluice::gpu::detail {

inline constexpr int kFlexWarps = 4;
inline constexpr int kFlexThreads = 32 * kFlexWarps;
inline constexpr int kFlexKeys = kFlexTile;
inline constexpr int kFlexChunk = 32;  ///< keys that a warp scores at a time
static_assert(kFlexRows == 32 * kFlexWarps);

/// Keys in shared memory. Piece c (16 bytes) of row r lies at c ^ (r % 8), which keeps the eight rows of a matrix in
/// different banks.
template <int kDim>
struct FlexKeys {
  static constexpr int kPieces = kDim / 8;
  uint4 k[kFlexKeys * kPieces];
  [[nodiscard]] static __device__ int at(int row, int piece) { return row * kPieces + (piece ^ (row % 8)); }
};

/// A warp's queries as A fragments [row tile][step of 16 elements].
template <int kDim>
struct FlexQueries {
  std::uint32_t q[2][kDim / 16][4];
};

/// [row tile][column block][C fragment]: element 2 * half + e is (row 16 m + 8 half + g, key 8 n + 2t + e).
using FlexScores = float[2][4][4];

template <int kDim>
__device__ void load_queries(FlexQueries<kDim>& queries, const FlexItem& item, std::uint32_t head) {
  const std::uint32_t lane = threadIdx.x % 32;
  const auto* const words = reinterpret_cast<const std::uint32_t*>(item.queries) + head * kFlexRows * (kDim / 2);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const std::uint32_t row = threadIdx.x / 32 * 32 + 16 * m + part % 2 * 8 + lane / 4;
        const std::uint32_t word = 8 * step + part / 2 * 4 + lane % 4;
        queries.q[m][step][part] = words[row * (kDim / 2) + word];
      }
    }
  }
}

/// Where keys lie, in registers: copies clobber memory, and what is read from there would be read again for each.
struct KeySource {
  __device__ explicit KeySource(const FlexItem& item)
      : base(item.base), frames(item.frames), keys(item.keys), page_tokens(item.page_tokens) {}
  const std::byte* base;
  const std::uint32_t* frames;
  std::uint32_t keys;
  std::uint32_t page_tokens;
};

/// Eight keys that begin at a multiple of 8 lie in one page. Lane i knows the row, counted from the base in rows of K
/// and V, of the tile's group i % 8.
__device__ inline std::uint32_t find_rows(const KeySource& from, std::uint32_t first) {
  const std::uint32_t key = first + threadIdx.x % 8 * 8;
  if (key >= from.keys) return 0;
  const std::uint32_t page = key / from.page_tokens;
  return from.frames[page] * 2 * from.page_tokens + key - page * from.page_tokens;
}

/// Starts copying the tile of keys from `first` on; zeros behind the last key.
template <int kDim>
__device__ void copy_keys(FlexKeys<kDim>& tile, const KeySource& from, std::uint32_t first, std::uint32_t rows) {
  constexpr int kPieces = FlexKeys<kDim>::kPieces;
  constexpr int kAtOnce = kFlexThreads / kPieces;  // A warp's rows of one turn are in one group of 8.
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kFlexKeys / kAtOnce; ++i) {
    const int row = i * kAtOnce + static_cast<int>(threadIdx.x) / kPieces;
    const std::uint64_t at = __shfl_sync(kAllLanes, rows, row / 8) + row % 8;
    copy_async(&tile.k[FlexKeys<kDim>::at(row, piece)], from.base + at * (2 * kDim) + piece * 16,
               first + row < from.keys);
  }
}

/// Calls use(tile, i) for each tile of the keys from `begin` on, all threads together, and after(i) when all warps are
/// done with it.
template <int kDim, class Use, class After>
__device__ void for_each_tile(FlexKeys<kDim> (&tiles)[2], const KeySource& from, std::uint32_t begin,
                              std::uint32_t count, const Use& use, const After& after) {
  copy_keys(tiles[0], from, begin, find_rows(from, begin));
  commit_copies();
  std::uint32_t rows = find_rows(from, begin + kFlexTile);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + 1 < count) {
      copy_keys(tiles[(i + 1) % 2], from, begin + (i + 1) * kFlexTile, rows);
      rows = find_rows(from, begin + (i + 2) * kFlexTile);
    }
    commit_copies();  // An empty group behind the last tile, so that the wait below always means tile i.
    wait_copies<1>();
    __syncthreads();
    use(tiles[i % 2], i);
    __syncthreads();  // The next copies overwrite the tile.
    after(i);
  }
}

template <class T, int kDim>
__device__ void score_chunk(FlexScores& scores, const FlexQueries<kDim>& queries, const FlexKeys<kDim>& tile,
                            int chunk) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.f;
    }
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t b[4];
      const int row = chunk * kFlexChunk + (n + lane / 16) * 8 + lane % 8;
      load_matrices(b, &tile.k[FlexKeys<kDim>::at(row, 2 * step + lane / 8 % 2)]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma<T>(scores[m][n], queries.q[m][step], b[0], b[1]);
        mma<T>(scores[m][n + 1], queries.q[m][step], b[2], b[3]);
      }
    }
  }
}

/// Scores of keys behind a row's own become -infinity. `position` is that of the warp's first row.
__device__ inline void hide_later_keys(FlexScores& scores, std::uint32_t first_key, std::uint32_t position) {
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint32_t key = first_key + 8 * n + 2 * (lane % 4) + e % 2;
        if (key > position + 16 * m + e / 2 * 8 + lane / 4) scores[m][n][e] = -INFINITY;
      }
    }
  }
}

/// Sums over the warp's rows, by key: to[32]. Lanes halve what they add up in every step.
__device__ inline void sum_columns(float* to, const FlexScores& weights) {
  const std::uint32_t lane = threadIdx.x % 32;
  const bool high = (lane & 16) != 0;
  const bool middle = (lane & 8) != 0;
  const bool low = (lane & 4) != 0;
  float sums[4][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[n][e] = (weights[0][n][e] + weights[0][n][2 + e]) + (weights[1][n][e] + weights[1][n][2 + e]);
    }
  }
  float half[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float other = __shfl_xor_sync(kAllLanes, high ? sums[n][e] : sums[n + 2][e], 16);
      half[n][e] = (high ? sums[n + 2][e] : sums[n][e]) + other;
    }
  }
  float quarter[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float other = __shfl_xor_sync(kAllLanes, middle ? half[0][e] : half[1][e], 8);
    quarter[e] = (middle ? half[1][e] : half[0][e]) + other;
  }
  const float other = __shfl_xor_sync(kAllLanes, low ? quarter[0] : quarter[1], 4);
  to[(high ? 16 : 0) + (middle ? 8 : 0) + 2 * (lane % 4) + (low ? 1 : 0)] = (low ? quarter[1] : quarter[0]) + other;
}

/// Sums over the diagonals of a warp's weights, 32 per chunk of keys.
///
/// 8x8 blocks with the same (row block - column block) = D are added up as they are: element (g, c) of their sum S[D]
/// belongs to the diagonal (row - key) = 8 D + g - c. With g < c that is one of the eight diagonals that begin at
/// 8 (D - 1), so U[D] = (S[D] where g >= c, else S[D + 1]) holds the diagonals 8 D + m, m = (g - c) mod 8, whole. They
/// run once around U[D], and are summed by lanes that hand each other rows 4, 2 and 1 further on the same diagonal.
/// A chunk completes U[3] .. U[0]; S[-3] .. S[0] stay open: they are S[1] .. S[4] of the next chunk.
struct Diagonals {
  float open[4][2];  ///< S[-3] .. S[0]

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) open[i][0] = open[i][1] = 0.f;
  }

  /// Diagonal (row - key) = x of the chunk, 0 <= x < 32, goes to to[31 - x].
  __device__ void add(float* to, const FlexScores& weights) {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
    float sums[8][2];  // S[-3] .. S[4]
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[0][e] = sums[1][e] = sums[2][e] = sums[3][e] = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 + i][e] = open[i][e];
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int column = 0; column < 4; ++column) {
          sums[row - column + 3][e] += weights[row / 2][column][2 * (row % 2) + e];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) open[i][e] = sums[i][e];
    }
    float whole[4][2];  // U[3] .. U[0]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) whole[i][e] = 2 * t + e <= g ? sums[6 - i][e] : sums[7 - i][e];
    }
    around(to, whole, g, t);
  }

 private:
  __device__ static void around(float* to, const float (&whole)[4][2], std::uint32_t g, std::uint32_t t) {
    const bool high = (g & 4) != 0;
    const bool middle = (g & 2) != 0;
    float half[2][2];  // Lanes with `high` go on with U[1] and U[0], the others with U[3] and U[2].
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // Row g +- 4, column +- 4: the lane with t +- 2.
        const float other = __shfl_xor_sync(kAllLanes, high ? whole[i][e] : whole[2 + i][e], 16 + 2);
        half[i][e] = (high ? whole[2 + i][e] : whole[i][e]) + other;
      }
    }
    float quarter[2];
    const std::uint32_t two_on = (g ^ 2) * 4 + (t + (middle ? 3 : 1)) % 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float other = __shfl_sync(kAllLanes, middle ? half[0][e] : half[1][e], static_cast<int>(two_on));
      quarter[e] = (middle ? half[1][e] : half[0][e]) + other;
    }
    // From an even row to the one below: from a lane's first column to its second, from that to the next lane's first.
    const std::uint32_t below = (g ^ 1) * 4;
    const float second = __shfl_sync(kAllLanes, quarter[1], static_cast<int>(below + t));
    const float first = __shfl_sync(kAllLanes, quarter[0], static_cast<int>(below + (t + 1) % 4));
    if (g % 2 == 0) {
      const std::uint32_t block = 8 * (3 - g / 2);
      to[31 - (block + ((g - 2 * t) & 7))] = quarter[0] + second;
      to[31 - (block + ((g - 2 * t - 1) & 7))] = quarter[1] + first;
    }
  }
};

}  // namespace sluice::gpu::detail
