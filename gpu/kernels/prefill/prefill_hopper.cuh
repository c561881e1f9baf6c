#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "gpu/kernels/tma.cuh"
#include "gpu/kernels/wgmma.cuh"

/// Causal attention of one query head and one block of 128 positions by products of whole warpgroups.
///
/// Blocks of queries and tiles of keys both lie on the grid of positions, so that only the last tile of a block is
/// masked by causality. Two warpgroups have 64 rows each; two warps of a third copy tiles of keys and of values into a
/// ring, page by page, straight from where the pages lie, and say with each which it is and what comes next. A
/// warpgroup starts the products of the next tile's keys before it makes weights of the scores that it has; named
/// barriers let the two take turns, so that the weights of the one are made while the tensor cores work for the other.
///
/// Keys that no row of the block may see are zeros in shared memory, whatever their pages hold. A row's own limit is
/// kept by weights of 0, so a NaN in V at a key that a later row of the same block attends reaches earlier rows too.
namespace sluice::gpu::detail {

inline constexpr int kTile = kPrefillBlock;  ///< queries of a block, keys of a tile
inline constexpr int kStages = kPrefillHopper.stages;
inline constexpr int kWarpgroup = 128;  ///< threads
inline constexpr int kConsumers = 2;    ///< warpgroups
inline constexpr int kHopperThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr std::uint32_t kNoTile = ~0u;
inline constexpr std::uint32_t kSlabBytes = kTile * kSlabRowBytes;

/// Named barriers: whose turn it is, and that of a warpgroup alone.
inline constexpr int kTurn = 1;
inline constexpr int kAlone = kTurn + kConsumers;

/// 128 rows as slabs of 64 columns, see wgmma.cuh.
template <int kDim>
inline constexpr int kSlabs = kDim / kSlabColumns;
template <int kDim>
struct Slabs {
  std::byte bytes[kSlabs<kDim> * kSlabBytes];
};

template <int kDim>
struct HopperMemory {
  Slabs<kDim> q;
  Slabs<kDim> k[kStages];
  Slabs<kDim> v[kStages];
};
/// Slabs begin at multiples of 1 KiB, dynamic shared memory at one of 16.
template <int kDim>
inline constexpr int kHopperBytes = sizeof(HopperMemory<kDim>) + 1024;

/// A stage is full when its whole tile is there, empty when both warpgroups are done with it.
struct RingStage {
  SharedBarrier full_k;
  SharedBarrier full_v;
  SharedBarrier empty_k;
  SharedBarrier empty_v;
  std::uint32_t tile;  ///< what is in the stage; kNoTile: the block has none
  std::uint32_t next;  ///< what comes after it; kNoTile: nothing
};
struct Ring {
  RingStage stages[kStages];
};

/// What one thread block computes.
struct QueryBlock {
  std::uint32_t position = 0;  ///< of its first row, a multiple of 128
  std::uint32_t head = 0;      ///< of the item
  std::uint32_t key_begin = 0;
  std::uint32_t key_end = 0;  ///< what its last row may see
  std::uint32_t reach = 0;    ///< of the item
  const std::uint32_t* mask = nullptr;
};

__device__ inline QueryBlock query_block(const PrefillItem& item, std::uint32_t index, std::uint32_t head) {
  const std::uint32_t position = (item.first / kTile + index) * kTile;
  const std::uint64_t row = (std::uint64_t{head} * item.query_blocks + index) * item.mask_words;
  return {.position = position,
          .head = head,
          .key_begin = item.key_begin,
          .key_end = min(item.key_end, position + kTile),
          .reach = item.reach,
          .mask = item.blocks == nullptr ? nullptr : item.blocks + row};
}

/// The first tile from `tile` on that is to be attended, kNoTile if there is none.
__device__ inline std::uint32_t next_tile(const QueryBlock& block, std::uint32_t tile) {
  const std::uint32_t end = (block.key_end + kTile - 1) / kTile;
  while (tile < end) {
    const std::uint32_t word = block.mask == nullptr ? ~0u : block.mask[tile / 32];
    const std::uint32_t left = word >> tile % 32;
    if (left != 0) {
      tile += __ffs(static_cast<int>(left)) - 1;
      return tile < end ? tile : kNoTile;
    }
    tile = (tile / 32 + 1) * 32;
  }
  return kNoTile;
}

/// One warp of two: copies the keys of the block's tiles, or their values, into the ring. A lane copies one page's part
/// of one slab, 8 to 128 rows.
template <int kDim>
__device__ void copy_tiles(const CUtensorMap& pages, const PrefillItem& item, const QueryBlock& block,
                           HopperMemory<kDim>& memory, Ring& ring) {
  const bool values = threadIdx.x >= 32;
  const std::uint32_t slab = threadIdx.x % kSlabs<kDim>;
  const std::uint32_t first_row = threadIdx.x % 32 / kSlabs<kDim> * min(item.page_tokens, kTile);
  const std::uint32_t page_shift = __ffs(static_cast<int>(item.page_tokens)) - 1;
  // Rows past a page's end are zeros: where there is nothing to see, a box begins there.
  const auto box_of = [&](std::uint32_t tile) {
    const std::uint32_t key = tile * kTile + first_row;
    BoxStart start{.x = static_cast<int>(slab * kSlabColumns), .y = static_cast<int>(item.page_tokens), .z = values};
    if (first_row < kTile && tile != kNoTile && key >= block.key_begin && key < block.key_end) {
      start.y = static_cast<int>(key & (item.page_tokens - 1));
      start.w = static_cast<int>(item.frames[(key - block.key_begin) >> page_shift]);
    }
    return start;
  };
  std::byte* const to = (values ? memory.v : memory.k)[0].bytes + slab * kSlabBytes + first_row * kSlabRowBytes;
  const std::uint32_t seen = max(block.key_begin, first_seen(block.position, block.reach));
  std::uint32_t tile = seen < block.key_end ? next_tile(block, seen / kTile) : kNoTile;
  if (tile == kNoTile && threadIdx.x == 0) {
    ring.stages[0].tile = kNoTile;
    ring.stages[0].full_k.arrive();
  }
  std::uint32_t index = 0;
  std::uint32_t parity = 1;  // All stages are empty before the first phase.
  BoxStart start = box_of(tile);
  while (tile != kNoTile) {
    const std::uint32_t next = next_tile(block, tile + 1);
    const BoxStart next_start = box_of(next);  // Looked up while the stage is waited for.
    RingStage& stage = ring.stages[index];
    SharedBarrier& full = values ? stage.full_v : stage.full_k;
    (values ? stage.empty_v : stage.empty_k).wait(parity);
    if (threadIdx.x % 32 == 0) {
      if (!values) {
        stage.tile = tile;
        stage.next = next;
      }
      full.arrive_and_expect(sizeof(Slabs<kDim>));
    }
    __syncwarp();
    if (first_row < kTile) copy_box(to + index * sizeof(Slabs<kDim>), pages, start, full);
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
    tile = next;
    start = next_start;
  }
}

/// 16 bytes of a row of the queries, which may lie anywhere.
__device__ inline uint4 load_piece(const std::byte* from, bool whole) {
  if (whole) return *reinterpret_cast<const uint4*>(from);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
  return {.x = halves[0] | std::uint32_t{halves[1]} << 16,
          .y = halves[2] | std::uint32_t{halves[3]} << 16,
          .z = halves[4] | std::uint32_t{halves[5]} << 16,
          .w = halves[6] | std::uint32_t{halves[7]} << 16};
}

/// A warpgroup copies its 64 rows of the queries, all loads at once; rows outside the chunk are zeros.
template <int kDim>
__device__ void copy_queries(Slabs<kDim>& q, const PrefillItem& item, const PrefillShape& shape,
                             const QueryBlock& block, std::uint32_t first_row) {
  constexpr std::uint32_t kPieces = kDim / 8;
  constexpr std::uint32_t kRowsAtOnce = kWarpgroup / kPieces;
  const std::uint32_t piece = threadIdx.x % kPieces;
  const std::uint32_t row = first_row + threadIdx.x % kWarpgroup / kPieces;
  const bool whole =
      (reinterpret_cast<std::uintptr_t>(item.q) % 16 | shape.q_token_stride % 8 | shape.q_head_stride % 8) == 0;
  uint4 pieces[64 / kRowsAtOnce];
#pragma unroll
  for (std::uint32_t i = 0; i < 64 / kRowsAtOnce; ++i) {
    // Wraps where the row is before the chunk.
    const std::uint32_t token = block.position + row + i * kRowsAtOnce - item.first;
    const std::uint64_t at = token * shape.q_token_stride + block.head * shape.q_head_stride + 8 * piece;
    pieces[i] = token < item.count ? load_piece(item.q + 2 * at, whole) : uint4{};
  }
#pragma unroll
  for (std::uint32_t i = 0; i < 64 / kRowsAtOnce; ++i) {
    const std::uint32_t to = row + i * kRowsAtOnce;
    const std::uint32_t at = piece / 8 * kSlabBytes + to * kSlabRowBytes + (piece % 8 ^ to % 8) * 16;
    *reinterpret_cast<uint4*>(q.bytes + at) = pieces[i];
  }
}

/// Zeros the values of a last tile that no row sees. Both warpgroups do so, each before its own products.
template <int kDim>
__device__ void clear_values(Slabs<kDim>& v, std::uint32_t first_row) {
  constexpr std::uint32_t kPieces = kDim / 8;
  for (std::uint32_t i = first_row * kPieces + threadIdx.x % kWarpgroup; i < kTile * kPieces; i += kWarpgroup) {
    const std::uint32_t at = i % kPieces / 8 * kSlabBytes + i / kPieces * kSlabRowBytes + i % 8 * 16;
    *reinterpret_cast<uint4*>(v.bytes + at) = uint4{};
  }
}

}  // namespace sluice::gpu::detail
