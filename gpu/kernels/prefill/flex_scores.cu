// What the representative rows attend: two passes over the keys, the first for every row's softmax, the second for the
// sums of its weights over columns and over diagonals. Thread blocks share the keys of a head in splits.

#include "gpu/kernels/prefill/flex_scores.cuh"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

/// Blocks of 32 diagonals that a warp's ring holds. A tile adds two; five are not settled, because warp w, whose rows
/// are 32 w further on, adds its part of a block w chunks after the first.
constexpr std::uint32_t kRing = 8;

constexpr int kBlocksAtOnce = 3;  ///< thread blocks on a multiprocessor

/// One thread block: a split of one head's keys.
struct Split {
  std::uint32_t head = 0;
  std::uint32_t index = 0;
  std::uint32_t begin = 0;
  std::uint32_t tiles = 0;
  std::uint32_t position = 0;  ///< of the warp's first row
  std::uint32_t least = 0;     ///< of the first row of all
};

__device__ Split split_of(const FlexItem& item, std::uint32_t group) {
  Split split{.head = blockIdx.x % group, .index = blockIdx.x / group};
  if (split.index >= item.splits) return split;
  split.begin = split.index * item.split_keys;
  split.tiles = (min(item.split_keys, item.keys - split.begin) + kFlexTile - 1) / kFlexTile;
  split.least = item.keys - item.rows;
  split.position = split.least + threadIdx.x / 32 * 32;
  return split;
}

/// Whether a tile may have keys behind one of the block's rows. The same for all warps.
__device__ bool has_later_keys(const Split& split, std::uint32_t first) { return first + kFlexTile > split.least + 1; }

/// One row's softmax as far as a lane has seen it, base 2.
struct RowState {
  float top = -INFINITY;
  float mass = 0.f;

  __device__ void rescale(float new_top) {
    if (new_top == -INFINITY) return;
    mass *= exp2_fast(top - new_top);
    top = new_top;
  }
  __device__ void merge_lanes() {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other_top = __shfl_xor_sync(kAllLanes, top, step);
      rescale(fmaxf(top, other_top));
      mass += __shfl_xor_sync(kAllLanes, mass, step);
    }
  }
};

/// Scores that are no numbers, or infinite, count as if the key were not there.
__device__ void add_scores(RowState (&rows)[2][2], const FlexScores& scores, float scale) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scaled[8];
      float top = rows[m][half].top;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float score = scores[m][i / 2][2 * half + i % 2] * scale;
        scaled[i] = score < INFINITY ? score : -INFINITY;
        top = fmaxf(top, scaled[i]);
      }
      rows[m][half].rescale(top);
      const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
      for (int i = 0; i < 8; ++i) rows[m][half].mass += exp2_fast(scaled[i] - base);
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexThreads, kBlocksAtOnce)
    flex_stats_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ FlexKeys<kDim> tiles[2];
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const Split split = split_of(item, args.group);
  if (split.tiles == 0) return;
  FlexQueries<kDim> queries;
  load_queries(queries, item, split.head);
  RowState rows[2][2];
  const float scale = args.score_scale * kLog2E;
  const auto use = [&](const FlexKeys<kDim>& tile, std::uint32_t i) {
    const std::uint32_t first = split.begin + i * kFlexTile;
    const bool hide = has_later_keys(split, first);
#pragma unroll 1
    for (int chunk = 0; chunk < kFlexKeys / kFlexChunk; ++chunk) {
      FlexScores scores;
      score_chunk<T>(scores, queries, tile, chunk);
      if (hide) hide_later_keys(scores, first + chunk * kFlexChunk, split.position);
      add_scores(rows, scores, scale);
    }
  };
  for_each_tile(tiles, KeySource(item), split.begin, split.tiles, use, [](std::uint32_t) {});
  float2* const out = item.stats + (std::uint64_t{split.head} * item.splits + split.index) * kFlexRows;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[m][half].merge_lanes();
      const std::uint32_t row = threadIdx.x / 32 * 32 + 16 * m + 8 * half + threadIdx.x % 32 / 4;
      if (threadIdx.x % 4 == 0) out[row] = make_float2(rows[m][half].top, rows[m][half].mass);
    }
  }
}

/// One thread per representative row of a head: blockIdx.x. A row without weight is left out of the mean.
__global__ void __launch_bounds__(kFlexRows) flex_shift_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint32_t row = threadIdx.x;
  const float2* const stats = item.stats + std::uint64_t{blockIdx.x} * item.splits * kFlexRows + row;
  float top = -INFINITY;
  for (std::uint32_t i = 0; i < item.splits; ++i) top = fmaxf(top, stats[std::uint64_t{i} * kFlexRows].x);
  float mass = 0.f;
  if (top != -INFINITY) {
    for (std::uint32_t i = 0; i < item.splits; ++i) {
      const float2 part = stats[std::uint64_t{i} * kFlexRows];
      mass += part.y * exp2_fast(part.x - top);
    }
  }
  const bool present = row < item.rows && mass > 0.f;
  const int rows = __syncthreads_count(present);
  item.shifts[blockIdx.x * kFlexRows + row] = present ? top + log2f(mass) + log2f(static_cast<float>(rows)) : INFINITY;
}

template <int kDim>
struct WeighMemory {
  FlexKeys<kDim> tiles[2];
  float columns[2][kFlexWarps][kFlexKeys];  ///< of even and of odd tiles
  float ring[kFlexWarps][kRing * 32];       ///< block y, of the diagonals row - key in [-32 y, 32 - 32 y), at y % kRing
};

/// Scores become weights in the mean over the rows.
__device__ void weigh(FlexScores& scores, const float (&shifts)[2][2], float scale) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float exponent = fmaf(scores[m][n][e], scale, -shifts[m][e / 2]);
        // A weight is at most 1, up to rounding: what is more comes of infinity, and NaN of what was no number.
        scores[m][n][e] = exponent < 1.f ? exp2_fast(exponent) : 0.f;
      }
    }
  }
}

/// What the warps found for column or diagonal i of a buffer, always in the same order.
template <std::size_t kLength>
__device__ float over_warps(const float (&parts)[kFlexWarps][kLength], std::uint32_t i) {
  return (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
}
template <int kDim>
__device__ float settled(const WeighMemory<kDim>& memory, std::uint32_t block, std::uint32_t i) {
  return over_warps(memory.ring, (block + i / 32) % kRing * 32 + i % 32);
}

/// The last chunk leaves a block of diagonals open; the warps' later blocks, up to the last warp's, have nothing.
template <int kDim>
__device__ void finish_diagonals(WeighMemory<kDim>& memory, Diagonals& diagonals, std::uint32_t chunks) {
  const std::uint32_t warp = threadIdx.x / 32;
  const FlexScores nothing = {};
  diagonals.add(memory.ring[warp] + (chunks - warp) % kRing * 32, nothing);
  for (std::uint32_t i = 1; i <= warp; ++i) {
    memory.ring[warp][(chunks - warp + i) % kRing * 32 + threadIdx.x % 32] = 0.f;
  }
  __syncthreads();
}

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexThreads, kBlocksAtOnce)
    flex_weigh_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ WeighMemory<kDim> memory;
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const Split split = split_of(item, args.group);
  if (split.tiles == 0) return;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  FlexQueries<kDim> queries;
  load_queries(queries, item, split.head);
  float shifts[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) shifts[i / 2][i % 2] = item.shifts[split.head * kFlexRows + warp * 32 + 8 * i + lane / 4];
  for (std::uint32_t i = lane; i < kRing * 32; i += 32) memory.ring[warp][i] = 0.f;
  __syncwarp();
  Diagonals diagonals;
  diagonals.clear();
  const float scale = args.score_scale * kLog2E;
  float* const columns = item.columns + split.head * item.lines() + split.begin;
  float* const pieces = item.pieces + (std::uint64_t{split.head} * item.splits + split.index) * item.piece_length();

  const auto use = [&](const FlexKeys<kDim>& tile, std::uint32_t i) {
    const std::uint32_t first = split.begin + i * kFlexTile;
    const bool hide = has_later_keys(split, first);
#pragma unroll 1
    for (int chunk = 0; chunk < kFlexKeys / kFlexChunk; ++chunk) {
      FlexScores scores;
      score_chunk<T>(scores, queries, tile, chunk);
      if (hide) hide_later_keys(scores, first + chunk * kFlexChunk, split.position);
      weigh(scores, shifts, scale);
      sum_columns(memory.columns[i % 2][warp] + chunk * kFlexChunk, scores);
      diagonals.add(memory.ring[warp] + (2 * i + chunk - warp) % kRing * 32, scores);
    }
  };
  // Half of the threads write the tile's columns, the others the two blocks of diagonals that no warp adds to any more.
  const auto after = [&](std::uint32_t i) {
    const std::uint32_t at = threadIdx.x % kFlexTile;
    if (threadIdx.x < kFlexTile) {
      columns[i * kFlexTile + at] = over_warps(memory.columns[i % 2], at);
    } else {
      pieces[i * kFlexTile + at] = settled(memory, 2 * i - 3, at);
    }
  };
  for_each_tile(memory.tiles, KeySource(item), split.begin, split.tiles, use, after);
  finish_diagonals(memory, diagonals, 2 * split.tiles);
  pieces[split.tiles * kFlexTile + threadIdx.x] = settled(memory, 2 * split.tiles - 3, threadIdx.x);
}

/// Calls `use` with the two kernels of a type and head_dim.
template <class T, class Use>
void with_dim(std::uint32_t head_dim, const Use& use) {
  head_dim == 64 ? use(flex_stats_kernel<T, 64>, flex_weigh_kernel<T, 64>)
                 : use(flex_stats_kernel<T, 128>, flex_weigh_kernel<T, 128>);
}
template <class Use>
void with_kernels(DType dtype, std::uint32_t head_dim, const Use& use) {
  dtype == DType::f16 ? with_dim<__half>(head_dim, use) : with_dim<__nv_bfloat16>(head_dim, use);
}

}  // namespace

void launch_flex_scores(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap* pages, cudaStream_t stream) {
  const dim3 splits(args.group * extent.splits, extent.items);
  const auto launch_shift = [&] {
    flex_shift_kernel<<<dim3(args.group, extent.items), kFlexRows, 0, stream>>>(args);
    check(cudaGetLastError(), "launch the softmax of select_blocks");
  };
  if (pages != nullptr) {
    launch_flex_hopper_stats(args, extent, *pages, stream);
    launch_shift();
    launch_flex_hopper_weigh(args, extent, *pages, stream);
    return;
  }
  with_kernels(args.dtype, args.head_dim, [&](auto* stats, auto* weigh) {
    stats<<<splits, kFlexThreads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch the first pass of select_blocks");
    launch_shift();
    weigh<<<splits, kFlexThreads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch the second pass of select_blocks");
  });
}

void load_flex_score_kernels() {
  const auto load = [](auto*... kernels) {
    (load_kernel(kernels, "load the score kernels of select_blocks"), ...);
  };
  load(flex_shift_kernel);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) with_kernels(dtype, head_dim, load);
  }
}

}  // namespace sluice::gpu
