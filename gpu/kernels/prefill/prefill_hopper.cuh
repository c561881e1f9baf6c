#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "gpu/kernels/tma.cuh"
#include "gpu/kernels/wgmma.cuh"

/// Causal attention of one query head and one block of 128 positions by products of whole warpgroups.
///
/// Blocks of queries and tiles of keys both lie on the grid of positions, so that only the last tile of a block is
/// masked by causality. Two warpgroups have 64 rows each; the warps of a third copy tiles of keys and of values into a
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
  if (block.mask == nullptr) return tile < end ? tile : kNoTile;
  while (tile < end) {
    const std::uint32_t word = block.mask[tile / 32];
    const std::uint32_t left = word >> tile % 32;
    if (left != 0) {
      tile += __ffs(static_cast<int>(left)) - 1;
      return tile < end ? tile : kNoTile;
    }
    tile = (tile / 32 + 1) * 32;
  }
  return kNoTile;
}

/// A value that all lanes of a warp have, from its first: the assembler keeps it as the warp's, and does not work it
/// out again wherever it is needed.
__device__ inline std::uint32_t of_warp(std::uint32_t value) { return __shfl_sync(kAllLanes, value, 0); }
__device__ inline int of_lane(int value, std::uint32_t lane) {
  return __shfl_sync(kAllLanes, value, static_cast<int>(lane));
}
/// True for one lane of the warp. The assembler knows that, and starts that lane's copies without a look at others.
__device__ inline bool one_of_warp() {
  std::uint32_t one;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one != 0;
}
/// Of a power of two.
__device__ inline std::uint32_t shift_of(std::uint32_t count) { return __ffs(static_cast<int>(count)) - 1; }

/// One warp: copies its slab of the block's tiles of keys, or of values, into the ring. It shares a scheduler with
/// warps that attend, so it has few instructions for a tile: a lane looks a page up, and the first starts the copies of
/// all.
template <int kDim>
class TileCopier {
 public:
  __device__ TileCopier(const CUtensorMap& pages, const PrefillItem& item, const QueryBlock& block,
                        HopperMemory<kDim>& memory, Ring& ring)
      : pages_(pages),
        block_(block),
        frames_(item.frames),
        page_tokens_(of_warp(item.page_tokens)),
        page_shift_(shift_of(page_tokens_)),
        rows_(min(page_tokens_, kTile)),
        warp_(of_warp(threadIdx.x / 32)),
        first_(of_warp(shared_address((values() ? memory.v : memory.k)[0].bytes) + slab() * kSlabBytes)),
        ring_(of_warp(shared_address(&ring))) {}

  __device__ void copy_all() {
    const std::uint32_t seen = max(block_.key_begin, first_seen(block_.position, block_.reach));
    std::uint32_t tile = of_warp(seen < block_.key_end ? next_tile(block_, seen / kTile) : kNoTile);
    if (tile == kNoTile && threadIdx.x == 0) {
      store_shared(ring_ + offsetof(RingStage, tile), kNoTile);
      for (int i = 0; i < kSlabs<kDim>; ++i) arrive_at(ring_ + offsetof(RingStage, full_k));
    }
    std::uint32_t index = 0;
    std::uint32_t parity = 1;  // All stages are empty before the first phase.
    int page = page_of(tile);
    while (tile != kNoTile) {
      const std::uint32_t next = of_warp(next_tile(block_, tile + 1));
      const int next_page = page_of(next);  // Looked up while the stage is waited for.
      const std::uint32_t stage = ring_ + index * sizeof(RingStage);
      wait_at(stage + (values() ? offsetof(RingStage, empty_v) : offsetof(RingStage, empty_k)), parity);
      const bool one = one_of_warp();
      if (one && warp_ == 0) {
        store_shared(stage + offsetof(RingStage, tile), tile);
        store_shared(stage + offsetof(RingStage, next), next);
      }
      copy(one, tile, page, first_ + index * sizeof(Slabs<kDim>),
           stage + (values() ? offsetof(RingStage, full_v) : offsetof(RingStage, full_k)));
      if (++index == kStages) {
        index = 0;
        parity ^= 1;
      }
      tile = next;
      page = next_page;
    }
  }

 private:
  [[nodiscard]] __device__ bool values() const { return warp_ >= kSlabs<kDim>; }
  [[nodiscard]] __device__ std::uint32_t slab() const { return warp_ % kSlabs<kDim>; }

  /// The one that this lane looks up. Outside of all is where nothing is to be seen, and becomes zeros.
  [[nodiscard]] __device__ int page_of(std::uint32_t tile) const {
    const std::uint32_t row = threadIdx.x % 32 * rows_;
    const std::uint32_t key = tile * kTile + row;
    const bool seen = row < kTile && tile != kNoTile && key >= block_.key_begin && key < block_.key_end;
    return seen ? static_cast<int>(frames_[(key - block_.key_begin) >> page_shift_]) : -1;
  }

  __device__ void copy(bool one, std::uint32_t tile, int page, std::uint32_t to, std::uint32_t full) const {
    if (one) arrive_and_expect_at(full, kSlabBytes);
    BoxStart start{.x = static_cast<int>(slab() * kSlabColumns),
                   .y = static_cast<int>(tile * kTile & (page_tokens_ - 1)),
                   .z = values()};
    for (std::uint32_t i = 0; i * rows_ < kTile; ++i) {
      start.w = of_lane(page, i);
      if (one) copy_box_at(to + i * rows_ * kSlabRowBytes, pages_, start, full);
    }
  }

  const CUtensorMap& pages_;
  const QueryBlock& block_;
  const std::uint32_t* const frames_;
  const std::uint32_t page_tokens_;
  const std::uint32_t page_shift_;
  const std::uint32_t rows_;  ///< of a box
  const std::uint32_t warp_;
  const std::uint32_t first_;  ///< where its slab is in the first stage
  const std::uint32_t ring_;
};

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
