// The two passes of flex_scores.cu by products of warpgroups. Both write the same sums, in another order.

#include "gpu/kernels/prefill/flex_scores_hopper.cuh"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr int kBlocksAtOnce = 2;  ///< thread blocks on a multiprocessor

template <int kDim>
struct StatsMemory {
  HopperKeys<kDim> tiles[kHopperTiles];
};

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexHopperThreads, kBlocksAtOnce)
    flex_hopper_stats_kernel(const __grid_constant__ CUtensorMap pages, const __grid_constant__ FlexArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SharedBarrier full[kHopperTiles];
  extern __shared__ uint4 shared[];
  auto& memory = aligned_memory<StatsMemory<kDim>>(shared);
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const HopperSplit split(item, args);
  if (split.tiles == 0) return;
  HopperQueries<kDim> queries;
  load_queries<kDim>(queries, item, split.head);
  HopperRow rows[2];
  const auto use = [&](const HopperKeys<kDim>& tile, std::uint32_t i) {
    HopperScores scores;
    split.score<T, kDim>(scores, queries, tile, i);
    rows[0].add(scores, 0, split.scale);
    rows[1].add(scores, 1, split.scale);
  };
  for_each_tile(memory.tiles, full, pages, item, split.begin, split.tiles, use, [](std::uint32_t) {});
  float2* const out = item.stats + (std::uint64_t{split.head} * item.splits + split.index) * kFlexRows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half].merge_lanes();
    const std::uint32_t row = threadIdx.x / 32 * kFlexWarpRows + 8 * half + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) out[row] = make_float2(rows[half].top, rows[half].mass);
  }
#endif
}

template <int kDim>
struct WeighMemory {
  HopperKeys<kDim> tiles[kHopperTiles];
  alignas(16) float columns[2][kFlexHopperWarps][kFlexTile];  ///< of even and of odd tiles
  float ring[kFlexHopperWarps][kHopperRing];  ///< diagonal i, counted as in `pieces`, at i % kHopperRing
};

/// What the warps found for column or diagonal i of a buffer, always in the same order.
template <std::size_t kLength>
__device__ float over_warps(const float (&parts)[kFlexHopperWarps][kLength], std::uint32_t i) {
  return ((parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i])) +
         ((parts[4][i] + parts[5][i]) + (parts[6][i] + parts[7][i]));
}

/// Scores become weights in the mean over the rows, and are summed up. A weight is at most 1, up to rounding: what is
/// no number, or infinite, comes of such a score, and shows in the sum.
template <int kDim>
__device__ void weigh(WeighMemory<kDim>& memory, HopperScores& scores, const float (&shifts)[2], float scale,
                      std::uint32_t tile) {
#pragma unroll
  for (int i = 0; i < 32; ++i) scores[i] = exp2_fast(fmaf(scores[i], scale, -shifts[i % 4 / 2]));
  float* const columns = memory.columns[tile % 2][threadIdx.x / 32];
  if (__all_sync(kAllLanes, sum_columns(columns, scores) < INFINITY)) return;
#pragma unroll
  for (int i = 0; i < 32; ++i) scores[i] = scores[i] < 2.f ? scores[i] : 0.f;
  __syncwarp();
  sum_columns(columns, scores);
}

/// The last tile leaves a warp's last diagonals open; behind them, up to the other warps', it has nothing.
template <int kDim>
__device__ void finish_diagonals(WeighMemory<kDim>& memory, HopperDiagonals& diagonals, std::uint32_t tiles) {
  auto& ring = memory.ring[threadIdx.x / 32];
  const HopperScores nothing = {};
  diagonals.add(ring, ring_begin(tiles), nothing);
  const std::uint32_t end = tiles * kFlexTile + kFlexRows;
  for (std::uint32_t i = ring_begin(tiles) + kFlexTile + threadIdx.x % 32; i < end; i += 32)
    ring[i % kHopperRing] = 0.f;
  __syncthreads();
}

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexHopperThreads, kBlocksAtOnce)
    flex_hopper_weigh_kernel(const __grid_constant__ CUtensorMap pages, const __grid_constant__ FlexArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SharedBarrier full[kHopperTiles];
  extern __shared__ uint4 shared[];
  auto& memory = aligned_memory<WeighMemory<kDim>>(shared);
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const HopperSplit split(item, args);
  if (split.tiles == 0) return;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  HopperQueries<kDim> queries;
  load_queries<kDim>(queries, item, split.head);
  float shifts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    shifts[i] = item.shifts[split.head * kFlexRows + warp * kFlexWarpRows + 8 * i + lane / 4];
  }
  for (std::uint32_t i = lane; i < kHopperRing; i += 32) memory.ring[warp][i] = 0.f;
  __syncwarp();
  HopperDiagonals diagonals;
  diagonals.clear();
  float* const columns = item.columns + split.head * item.lines() + split.begin;
  float* const pieces = item.pieces + (std::uint64_t{split.head} * item.splits + split.index) * item.piece_length();

  const auto use = [&](const HopperKeys<kDim>& tile, std::uint32_t i) {
    HopperScores scores;
    split.score<T, kDim>(scores, queries, tile, i);
    weigh(memory, scores, shifts, split.scale, i);
    diagonals.add(memory.ring[warp], ring_begin(i), scores);
  };
  // Some threads write the tile's columns, others the diagonals that no warp adds to any more.
  const auto after = [&](std::uint32_t i) {
    const std::uint32_t at = threadIdx.x % kFlexTile;
    if (threadIdx.x < kFlexTile) {
      columns[i * kFlexTile + at] = over_warps(memory.columns[i % 2], at);
    } else if (threadIdx.x < 2 * kFlexTile) {
      pieces[i * kFlexTile + at] = over_warps(memory.ring, (i * kFlexTile + at) % kHopperRing);
    }
  };
  for_each_tile(memory.tiles, full, pages, item, split.begin, split.tiles, use, after);
  finish_diagonals(memory, diagonals, split.tiles);
  const std::uint32_t at = split.tiles * kFlexTile + threadIdx.x;
  if (threadIdx.x < kFlexRows) pieces[at] = over_warps(memory.ring, at % kHopperRing);
#endif
}

struct Pass {
  void (*kernel)(CUtensorMap, FlexArgs);
  int shared_bytes;
};
struct Passes {
  Pass stats;
  Pass weigh;
};
template <class T, int kDim>
Passes passes_of() {
  return {.stats = {flex_hopper_stats_kernel<T, kDim>, kHopperBytesOf<StatsMemory<kDim>>},
          .weigh = {flex_hopper_weigh_kernel<T, kDim>, kHopperBytesOf<WeighMemory<kDim>>}};
}
Passes passes_of(DType dtype, std::uint32_t head_dim) {
  if (dtype == DType::f16) return head_dim == 64 ? passes_of<__half, 64>() : passes_of<__half, 128>();
  return head_dim == 64 ? passes_of<__nv_bfloat16, 64>() : passes_of<__nv_bfloat16, 128>();
}

void launch(const Pass& pass, const FlexArgs& args, const FlexExtent& extent, const CUtensorMap& pages,
            cudaStream_t stream) {
  const dim3 splits(args.group * extent.splits, extent.items);
  pass.kernel<<<splits, kFlexHopperThreads, pass.shared_bytes, stream>>>(pages, args);
}

}  // namespace

void launch_flex_hopper_stats(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap& pages,
                              cudaStream_t stream) {
  launch(passes_of(args.dtype, args.head_dim).stats, args, extent, pages, stream);
  check(cudaGetLastError(), "launch the first pass of select_blocks");
}

void launch_flex_hopper_weigh(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap& pages,
                              cudaStream_t stream) {
  launch(passes_of(args.dtype, args.head_dim).weigh, args, extent, pages, stream);
  check(cudaGetLastError(), "launch the second pass of select_blocks");
}

void load_flex_hopper_kernels() {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) {
      const Passes passes = passes_of(dtype, head_dim);
      for (const Pass& pass : {passes.stats, passes.weigh}) {
        load_kernel(pass.kernel, "load the score kernels of select_blocks", pass.shared_bytes);
      }
    }
  }
}

}  // namespace sluice::gpu
