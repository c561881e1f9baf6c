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
/// ring, page by page, straight from where the pages lie, and say with each which it is. A warpgroup starts the
/// products of the next tile's keys before it makes weights of the scores that it has; named barriers let the two take
/// turns, so that the weights of the one are made while the tensor cores work for the other.
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

/// A stage is full when all slabs of its tile are there, empty when both warpgroups are done with it.
struct Ring {
  SharedBarrier full_k[kStages];
  SharedBarrier full_v[kStages];
  SharedBarrier empty_k[kStages];
  SharedBarrier empty_v[kStages];
  std::uint32_t tile[kStages];  ///< what is in the stage; kNoTile: nothing is to come
};

/// By every warp of the consumers when it is done with a stage.
__device__ inline void release(SharedBarrier& empty) {
  if (threadIdx.x % 32 == 0) empty.arrive();
}

struct Stage {
  int index = 0;
  std::uint32_t parity = 0;
  __device__ void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
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

/// One warp: copies its slab of the tiles of keys, or of values, into the ring. A lane copies one page's part, 8 to 128
/// rows.
template <int kDim>
__device__ void copy_tiles(const CUtensorMap& pages, const PrefillItem& item, const QueryBlock& block,
                           HopperMemory<kDim>& memory, Ring& ring) {
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t slab = warp % kSlabs<kDim>;
  const bool values = warp >= kSlabs<kDim>;
  const std::uint32_t first_row = threadIdx.x % 32 * min(item.page_tokens, kTile);
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
  SharedBarrier* const empty = values ? ring.empty_v : ring.empty_k;
  SharedBarrier* const full = values ? ring.full_v : ring.full_k;
  std::byte* const to = (values ? memory.v : memory.k)[0].bytes + slab * kSlabBytes + first_row * kSlabRowBytes;
  Stage stage{.index = 0, .parity = 1};  // All stages are empty before the first phase.
  const std::uint32_t seen = max(block.key_begin, first_seen(block.position, block.reach));
  std::uint32_t tile = seen < block.key_end ? next_tile(block, seen / kTile) : kNoTile;
  BoxStart start = box_of(tile);
  while (tile != kNoTile) {
    const std::uint32_t next = next_tile(block, tile + 1);
    const BoxStart next_start = box_of(next);  // Looked up while the stage is waited for.
    empty[stage.index].wait(stage.parity);
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) ring.tile[stage.index] = tile;
      full[stage.index].arrive_and_expect(kSlabBytes);
    }
    __syncwarp();
    if (first_row < kTile) copy_box(to + stage.index * sizeof(Slabs<kDim>), pages, start, full[stage.index]);
    stage.next();
    tile = next;
    start = next_start;
  }
  if (values) return;
  empty[stage.index].wait(stage.parity);
  if (threadIdx.x % 32 == 0) {
    if (warp == 0) ring.tile[stage.index] = kNoTile;
    full[stage.index].arrive();
  }
}

/// One warpgroup's state: sums of products as accumulators, and of its two rows per thread the largest score and the
/// weights of this lane's keys.
template <int kDim>
struct HopperRows {
  float out[kDim / 2];
  float top[2];
  float mass[2];
};

/// A warpgroup copies its 64 rows of the queries; rows outside the chunk are zeros.
template <int kDim>
__device__ void copy_queries(Slabs<kDim>& q, const PrefillItem& item, const PrefillShape& shape,
                             const QueryBlock& block, std::uint32_t first_row) {
  constexpr std::uint32_t kPieces = kDim / 8;
  const bool whole =
      (reinterpret_cast<std::uintptr_t>(item.q) % 16 | shape.q_token_stride % 8 | shape.q_head_stride % 8) == 0;
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x % kWarpgroup; i < 64 * kPieces; i += kWarpgroup) {
    const std::uint32_t row = first_row + i / kPieces;
    const std::uint32_t piece = i % kPieces;
    const std::uint32_t token = block.position + row - item.first;  // Wraps where the row is before the chunk.
    uint4 words{};
    if (token < item.count) {
      const std::byte* const from =
          item.q + 2 * (token * shape.q_token_stride + block.head * shape.q_head_stride + 8 * piece);
      if (whole) {
        words = *reinterpret_cast<const uint4*>(from);
      } else {
        const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
        words.x = halves[0] | std::uint32_t{halves[1]} << 16;
        words.y = halves[2] | std::uint32_t{halves[3]} << 16;
        words.z = halves[4] | std::uint32_t{halves[5]} << 16;
        words.w = halves[6] | std::uint32_t{halves[7]} << 16;
      }
    }
    const std::uint32_t at = piece / 8 * kSlabBytes + row * kSlabRowBytes + (piece % 8 ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(q.bytes + at) = words;
  }
}

/// scores = Q K^T of a warpgroup's 64 rows; `q` is the address of the first.
template <class T, int kDim>
__device__ void score_keys(float (&scores)[64], std::uint32_t q, std::uint32_t k) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const std::uint32_t at = step / 4 * kSlabBytes + step % 4 * 32;
    multiply_rows<T>(scores, describe_rows(q + at), describe_rows(k + at), step != 0);
  }
}

/// out += P V
template <class T, int kDim>
__device__ void add_values(float (&out)[kDim / 2], const std::uint32_t (&weights)[kTile / 16][4], std::uint32_t v) {
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    multiply_columns<T>(out, weights[step], describe_columns(v + step * 16 * kSlabRowBytes, kSlabBytes));
  }
}

/// Masks the keys of a tile that a row may not see. The thread's first row is at `position`.
__device__ inline void mask_scores(float (&scores)[64], const QueryBlock& block, std::uint32_t position,
                                   std::uint32_t tile) {
  const int first_key = static_cast<int>(tile * kTile + 2 * (threadIdx.x % 4));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = static_cast<int>(max(block.key_begin, first_seen(position + 8 * half, block.reach))) - first_key;
    const int end = static_cast<int>(min(block.key_end, position + 8 * half + 1)) - first_key;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * n + 2 * half + e];
        score = 8 * n + e >= begin && 8 * n + e < end ? score : -INFINITY;
      }
    }
  }
}

/// Makes scores weights relative to the rows' new tops, to which `factor` scales what was summed up before.
template <int kDim>
__device__ void weigh_scores(float (&scores)[64], HopperRows<kDim>& rows, float (&factor)[2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = rows.top[half];
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      top = fmaxf(top, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float base = top == -INFINITY ? 0.f : top * scale;
    factor[half] = exp2_fast(rows.top[half] * scale - base);
    rows.top[half] = top;
    float mass[2] = {rows.mass[half] * factor[half], 0.f};
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * n + 2 * half + e];
        score = exp2_fast(score * scale - base);
        mass[e] += score;
      }
    }
    rows.mass[half] = mass[0] + mass[1];
  }
}

template <class T>
__device__ void pack_weights(std::uint32_t (&packed)[kTile / 16][4], const float (&weights)[64]) {
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      packed[step][part] = pack<T>(weights[8 * step + 2 * part], weights[8 * step + 2 * part + 1]);
    }
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
