#pragma once

#include <cstdint>

#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"

/// Which rows and which tiles of keys a thread block of the prefill kernel has.
namespace sluice::gpu::detail {

inline constexpr int kRows = kPrefill.rows;
inline constexpr int kPrefillThreads = 2 * kRows;  ///< a warp per 16 rows
inline constexpr std::uint32_t kNoTile = ~0u;

/// Beyond head_dim 128 the results alone take half the registers: queries lie in shared memory, and tiles are so short
/// that both fit into the 99 KiB that every supported GPU has.
template <int kDim, int kTerms>
inline constexpr bool kQueriesShared = kDim > 128;
template <int kDim, int kTerms>
inline constexpr int kKeysOf = kQueriesShared<kDim, kTerms> ? 32 / kTerms : kPrefill.keys;

/// What one thread block attends. Rows are counted from `lead` rows before the item's first.
struct RowTile {
  std::uint32_t first_row = 0;
  std::uint32_t lead = 0;
  std::uint32_t key_begin = 0;
  std::uint32_t key_end = 0;     ///< what its last row may see
  std::uint32_t seen_begin = 0;  ///< what its first row may see, at least key_begin
  std::uint32_t full_begin = 0;  ///< from there on, what all its rows may see
  std::uint32_t full_end = 0;    ///< up to here
  const std::uint32_t* mask = nullptr;
};

/// `index` is below the number of the item's tiles of rows.
__device__ inline RowTile row_tile(const PrefillItem& item, std::uint32_t index) {
  RowTile tile{.first_row = index * kRows, .key_begin = item.key_begin};
  if (item.blocks != nullptr) {
    tile.lead = item.first % kRows;
    const std::uint32_t block = (item.first - tile.lead + tile.first_row) / kPrefillBlock - item.first / kPrefillBlock;
    tile.mask = item.blocks + std::uint64_t{block} * item.mask_words;
  }
  const std::uint32_t last_row = min(tile.first_row + kRows, tile.lead + item.count * item.heads) - 1;
  const std::uint32_t first_row = max(tile.first_row, tile.lead);
  tile.key_end = min(item.key_end, item.first + (last_row - tile.lead) / item.heads + 1);
  tile.full_end = min(item.key_end, item.first + (first_row - tile.lead) / item.heads + 1);
  tile.seen_begin =
      max(item.key_begin, first_seen(item.first + (first_row - tile.lead) / item.heads, item.reach));
  tile.full_begin = max(item.key_begin, first_seen(item.first + (last_row - tile.lead) / item.heads, item.reach));
  return tile;
}

/// The first tile of keys from `tile` on that is to be attended, kNoTile if there is none.
template <int kKeys>
__device__ inline std::uint32_t next_tile(const RowTile& rows, std::uint32_t tile) {
  constexpr std::uint32_t kPerBlock = kPrefillBlock / kKeys;
  constexpr std::uint32_t kPerWord = 32 * kPerBlock;
  const std::uint32_t end = rows.key_begin < rows.key_end ? (rows.key_end + kKeys - 1) / kKeys : 0;
  while (tile < end) {
    const std::uint32_t word = rows.mask == nullptr ? ~0u : rows.mask[tile / kPerWord];
    const std::uint32_t block = tile / kPerBlock;
    const std::uint32_t left = word >> block % 32;
    if ((left & 1) != 0) return tile;
    tile = left == 0 ? (tile / kPerWord + 1) * kPerWord : (block + __ffs(static_cast<int>(left)) - 1) * kPerBlock;
  }
  return kNoTile;
}

/// What a thread knows of its two rows, g and g + 8 of its warp's 16.
struct RowPair {
  std::uint32_t token[2];  ///< of the chunk
  std::uint32_t head[2];
  bool there[2];  ///< false: not of the chunk; computed like its last row, not written
};

__device__ inline RowPair rows_of_thread(const RowTile& tile, const PrefillItem& item) {
  const std::uint32_t all = item.count * item.heads;
  RowPair rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t row = tile.first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half - tile.lead;
    rows.there[half] = row < all;  // A row of the lead wraps.
    const std::uint32_t known = min(row, all - 1);
    rows.token[half] = known / item.heads;
    rows.head[half] = known % item.heads;
  }
  return rows;
}

}  // namespace sluice::gpu::detail
