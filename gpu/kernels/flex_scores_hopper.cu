// The two passes of flex_scores.cu by products of warpgroups. Both write the same sums, in another order.

#include "gpu/kernels/flex_scores_hopper.cuh"

#include "gpu/cuda_error.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr float kLog2OfE = 1.44269504088896340736f;
constexpr int kBlocksAtOnce = 2;  ///< thread blocks on a multiprocessor

/// One thread block: a split of one head's keys.
struct Split {
  std::uint32_t head = 0;
  std::uint32_t index = 0;
  std::uint32_t begin = 0;
  std::uint32_t tiles = 0;
  std::uint32_t position = 0;  ///< of the warp's first row
  std::uint32_t least = 0;     ///< of the first row of all
  float scale = 0.f;

  __device__ Split(const FlexItem& item, const FlexArgs& args)
      : head(blockIdx.x % args.group), index(blockIdx.x / args.group), scale(args.score_scale * kLog2OfE) {
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
struct RowState {
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

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexHopperThreads, kBlocksAtOnce)
    flex_hopper_stats_kernel(const __grid_constant__ FlexArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ HopperKeys<kDim> tiles[2];
  const FlexItem& item = args.items[blockIdx.y];
  const Split split(item, args);
  if (split.tiles == 0) return;
  HopperQueries<kDim> queries;
  load_queries<kDim>(queries, item, split.head);
  RowState rows[2];
  const auto use = [&](const HopperKeys<kDim>& tile, std::uint32_t i) {
    HopperScores scores;
    split.score<T, kDim>(scores, queries, tile, i);
    rows[0].add(scores, 0, split.scale);
    rows[1].add(scores, 1, split.scale);
  };
  for_each_tile(tiles, KeySource(item), split.begin, split.tiles, use, [](std::uint32_t) {});
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
  HopperKeys<kDim> tiles[2];
  alignas(16) float columns[2][kFlexHopperWarps][kFlexTile];  ///< of even and of odd tiles
  float ring[kFlexHopperWarps][kHopperRing];                  ///< diagonal i, counted as in `pieces`, at i % kHopperRing
};

/// Where a warp's diagonals of a tile begin.
__device__ inline std::uint32_t ring_begin(std::uint32_t tile) {
  return tile * kFlexTile + (kFlexRows - kFlexWarpRows) - threadIdx.x / 32 * kFlexWarpRows;
}

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
  for (std::uint32_t i = ring_begin(tiles) + kFlexTile + threadIdx.x % 32; i < end; i += 32) ring[i % kHopperRing] = 0.f;
  __syncthreads();
}

template <class T, int kDim>
__global__ void __launch_bounds__(kFlexHopperThreads, kBlocksAtOnce)
    flex_hopper_weigh_kernel(const __grid_constant__ FlexArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ WeighMemory<kDim> memory;
  const FlexItem& item = args.items[blockIdx.y];
  const Split split(item, args);
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
  for_each_tile(memory.tiles, KeySource(item), split.begin, split.tiles, use, after);
  finish_diagonals(memory, diagonals, split.tiles);
  const std::uint32_t at = split.tiles * kFlexTile + threadIdx.x;
  if (threadIdx.x < kFlexRows) pieces[at] = over_warps(memory.ring, at % kHopperRing);
#endif
}

/// Calls `use` with the two kernels of a type and head_dim.
template <class T, class Use>
void with_dim(std::uint32_t head_dim, const Use& use) {
  head_dim == 64 ? use(flex_hopper_stats_kernel<T, 64>, flex_hopper_weigh_kernel<T, 64>)
                 : use(flex_hopper_stats_kernel<T, 128>, flex_hopper_weigh_kernel<T, 128>);
}
template <class Use>
void with_kernels(DType dtype, std::uint32_t head_dim, const Use& use) {
  dtype == DType::f16 ? with_dim<__half>(head_dim, use) : with_dim<__nv_bfloat16>(head_dim, use);
}

}  // namespace

void launch_flex_hopper_stats(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  with_kernels(args.dtype, args.head_dim, [&](auto* stats, auto*) {
    stats<<<dim3(args.group * extent.splits, extent.items), kFlexHopperThreads, 0, stream>>>(args);
  });
  check(cudaGetLastError(), "launch the first pass of select_blocks");
}

void launch_flex_hopper_weigh(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  with_kernels(args.dtype, args.head_dim, [&](auto*, auto* weigh) {
    weigh<<<dim3(args.group * extent.splits, extent.items), kFlexHopperThreads, 0, stream>>>(args);
  });
  check(cudaGetLastError(), "launch the second pass of select_blocks");
}

void load_flex_hopper_kernels() {
  const auto load = [](auto*... kernels) {
    cudaFuncAttributes attributes{};
    (check(cudaFuncGetAttributes(&attributes, kernels), "load the score kernels of select_blocks"), ...);
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) with_kernels(dtype, head_dim, load);
  }
}

}  // namespace sluice::gpu
