// Estimated logits from 4-bit copies, on tensor cores. The few keys of a tail are a thread block's of their own. Scores
// that will be candidates for top-k are put aside on the way.

#include <algorithm>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/foresight.cuh"
#include "gpu/kernels/select/score_int4_fragments.cuh"
#include "gpu/kernels/select/score_int4_sums.cuh"

namespace sluice::gpu {
namespace {

using namespace score_int4;

__device__ __forceinline__ float load_key(const std::byte* row, std::uint32_t channel, DType dtype) {
  switch (dtype) {
    case DType::f32: return detail::load_element<DType::f32>(row + 4 * channel);
    case DType::f16: return detail::load_element<DType::f16>(row + 2 * channel);
    case DType::bf16: return detail::load_element<DType::bf16>(row + 2 * channel);
    case DType::fp8_e4m3: break;  // Tails lie near.
  }
  return 0.f;
}

/// A warp takes every kWarps-th row, a lane neighbouring channels of it.
template <std::uint32_t kHeadDim>
__device__ void score_tail(const ScoreInt4Task& task, const Part& part, DType dtype, float scale) {
  constexpr std::uint32_t kChannels = kHeadDim / kWarp;
  constexpr std::uint32_t kHeadsAtOnce = 4;  // Their reductions overlap.
  const std::uint32_t lane = threadIdx.x % kWarp;
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.tail_rows; row += kWarps) {
    const std::byte* const key = task.tail + std::uint64_t{row} * kHeadDim * bytes_of(dtype);
    float k[kChannels];
#pragma unroll
    for (std::uint32_t c = 0; c < kChannels; ++c) k[c] = load_key(key, lane * kChannels + c, dtype);
    for (std::uint32_t first = 0; first < part.heads; first += kHeadsAtOnce) {
      float sums[kHeadsAtOnce] = {};
#pragma unroll
      for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        const std::uint32_t head = part.first_head + min(first + h, part.heads - 1);
        const float* const q = task.q + std::uint64_t{head} * kHeadDim + lane * kChannels;
#pragma unroll
        for (std::uint32_t c = 0; c < kChannels; ++c) sums[h] += q[c] * k[c];
      }
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
        for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) sums[h] += __shfl_xor_sync(detail::kAllLanes, sums[h], step);
      }
#pragma unroll
      for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        if (lane != h || first + h >= part.heads) continue;
        task.out[std::uint64_t{part.first_head + first + h} * part.stride + part.count + row] = sums[h] * scale;
      }
    }
  }
}

/// Of a list whose pages have no visible tokens: there may be no copies to read.
__device__ void fill_nothing(const ScoreInt4Task& task, const Part& part) {
  float* const out = task.out + std::uint64_t{part.first_head} * part.stride;
  for (std::uint32_t token = blockIdx.x * kThreads + threadIdx.x; token < part.count; token += part.blocks * kThreads)
    out[token] = __int_as_float(0xff80'0000);
}

/// Tokens that may be candidates: what is attended anyway is none, as recent tokens score high, and would take the
/// place of others.
struct Eligible {
  std::uint32_t begin, end;
};

/// Scores of a warp's tokens from `at` on, of which a lane has four, for one fragment's heads: written out. Bit i of
/// what it returns: score i is a candidate. `kWhole`: all tokens are there, and eligible.
template <bool kWhole, std::uint32_t kHeadDim, std::uint32_t kFragments, bool kForesees>
__device__ __forceinline__ std::uint32_t score_turn(const Shared<kHeadDim>& s,
                                                    const Products<kHeadDim, kFragments>& products,
                                                    const float2 (&params)[kWarpOctets], std::uint32_t fragment,
                                                    const LaneHead& head, const Part& part, std::uint32_t at,
                                                    std::uint32_t number, const Eligible& eligible,
                                                    float (&scores)[kWarpOctets]) {
  std::uint32_t hits = 0;
  float* const out = head.out + at;
#pragma unroll
  for (std::uint32_t o = 0; o < kWarpOctets; ++o) {
    const std::uint32_t behind = kRows * o;  // Of the lane's first one.
    scores[o] = params[o].x * (products.of(fragment, o) * head.unit) + params[o].y * head.sum;
    bool candidate = kForesees && scores[o] >= head.least;
    if constexpr (kWhole) {
      if (head.there) out[behind] = scores[o];
    } else {
      const std::uint32_t token = at + lane_row() + behind;
      const bool visible = there(s, number, o) && token < part.count;
      if (!visible) scores[o] = -INFINITY;
      if (head.there && token < part.count) out[behind] = scores[o];
      candidate &= visible && token >= eligible.begin && token < eligible.end;
    }
    hits |= candidate ? 1u << o : 0;
  }
  return hits;
}

/// Thread block x of the cut, or behind these the tail, of task y, and of its head z where each has a list.
/// `kFragments` of queries are multiplied with what is read.
template <std::uint32_t kHeadDim, std::uint32_t kFragments, bool kForesees>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    score_int4_kernel(const __grid_constant__ TaskArray<ScoreInt4Task> tasks,
                      const __grid_constant__ Foresight foresight, const ScoreSums sums, const ScoreInt4Shape shape,
                      Cut cut) {
  __shared__ Shared<kHeadDim> s;
  __shared__ float2 staged_sums[kWarps][kHeads];
  constexpr std::uint32_t kAtOnce = kFragments * kTileHeads;
  __shared__ foresight::Staged<kWarps, kAtOnce, kForesees ? 256 / kAtOnce : 1> staged;
  detail::wait_for_kernel_before();
  const std::uint32_t group = shape.group;
  const Int4Layout layout = shape.layout;
  if (threadIdx.x == 0) s.task = tasks[blockIdx.y];
  __syncthreads();
  const Part part = part_of(s.task, group, layout.page_tokens, cut);
  if (blockIdx.x == cut.blocks) return score_tail<kHeadDim>(s.task, part, shape.dtype, shape.scale);
  if (part.chunk(0) * kBlockTokens >= part.count) return;
  if (s.task.tokens == 0) return fill_nothing(s.task, part);
  // Queries are on their way while it is found out where rows lie, and rows while queries are staged and the rows
  // before them are multiplied, if there are registers for both.
  constexpr bool kAhead = kHeadDim * kFragments <= 128;
  constexpr bool kTellsWhole = kHeadDim <= 128;  // Likewise.
  QueryRow<kHeadDim> query;
  CenterRow<kHeadDim, kForesees> center;  // Of all heads.
  if (kAhead) query.load(s.task, part.first_head, min(kAtOnce, part.heads));
  if (kForesees) center.load(foresight.centers + std::uint64_t{blockIdx.y} * kHeadDim);
  stage_octets(s, part, layout, cut.chunks);
  __syncthreads();
  const LaneRow<kHeadDim> row(s.task.copies);
  const Eligible eligible{s.task.sinks, s.task.recent};
  for (std::uint32_t first = 0; first < part.heads; first += kAtOnce) {
    const std::uint32_t heads = min(kAtOnce, part.heads - first);
    if (!kAhead || first != 0) query.load(s.task, part.first_head + first, heads);
    if (first != 0) __syncthreads();  // The queries before these have been read.
    WarpRows<kHeadDim> next;
    if (kAhead) next.load(s, row, part.octet(0), part.first(0) < part.count);
    const foresight::Finder finder(foresight, std::uint64_t{blockIdx.y} * group + first);
    const foresight::QueryMeasure measure = stage_query(s, query, center, shape.scale);
    if (kForesees && threadIdx.x % kWarp == 0) {
      const std::uint32_t head = threadIdx.x / kWarp;
      s.least[head] = head < heads ? finder.least(head, measure) : INFINITY;
    }
    __syncthreads();
    QueryFragments<kHeadDim, kFragments> q;
    q.load(s);
    LaneHead lane_heads[kFragments];  // In registers: in the loop the compiler would read them again and again.
#pragma unroll
    for (std::uint32_t f = 0; f < kFragments; ++f) {
      const std::uint32_t head = f * kTileHeads + lane_head();
      lane_heads[f] = {.there = head < heads,
                       .unit = s.unit[head],
                       .sum = s.sum[head],
                       .least = kForesees ? s.least[head] : 0.f,
                       .out = s.task.out + std::uint64_t{part.first_head + first + head} * part.stride + lane_row()};
    }
    std::uint32_t found[kFragments] = {};
    detail::PowerSum weighed[kFragments];
#pragma unroll 1
    for (std::uint32_t turn = 0; turn < cut.chunks; ++turn) {
      const std::uint32_t at = part.first(turn);
      const std::uint32_t number = part.octet(turn);
      if (at >= part.count) break;
      if (!kAhead) next.load(s, row, number, true);
      const KeyFragments<kHeadDim> keys(next);
      if (kAhead) {
        const bool more = turn + 1 < cut.chunks && part.first(turn + 1) < part.count;
        next.load(s, row, part.octet(more ? turn + 1 : turn), more);
      }
      const Products<kHeadDim, kFragments> products(keys, q);
      float2 params[kWarpOctets];
#pragma unroll
      for (std::uint32_t o = 0; o < kWarpOctets; ++o) params[o] = keys.scale_and_zero(o);
      const bool all =
          kTellsWhole && whole(s, number) && (!kForesees || (at >= eligible.begin && at + kWarpTokens <= eligible.end));
#pragma unroll
      for (std::uint32_t f = 0; f < kFragments; ++f) {
        const LaneHead& head = lane_heads[f];
        float scores[kWarpOctets];
        const std::uint32_t hits = all ? score_turn<true, kHeadDim, kFragments, kForesees>(
                                             s, products, params, f, head, part, at, number, eligible, scores)
                                       : score_turn<false, kHeadDim, kFragments, kForesees>(
                                             s, products, params, f, head, part, at, number, eligible, scores);
        if (sums.sums != nullptr) weigh(weighed[f], scores, sums.softcap);
        if constexpr (kForesees) {
          // What is chosen is often close together: most turns have nothing to add, or of one octet.
#pragma unroll 1
          for (std::uint32_t some = __reduce_or_sync(detail::kAllLanes, hits); some != 0; some &= some - 1) {
            const std::uint32_t o = __ffs(static_cast<int>(some)) - 1;
            const float score = o < 2 ? (o == 0 ? scores[0] : scores[1]) : (o == 2 ? scores[2] : scores[3]);
            finder.add(staged, f * kTileHeads + lane_head(), lanes_of_head(), (hits >> o & 1) != 0,
                       {.key = order_key(score), .token = at + lane_row() + o * kRows}, found[f]);
          }
        }
      }
    }
    if constexpr (kForesees) {
#pragma unroll
      for (std::uint32_t f = 0; f < kFragments; ++f)
        staged.counts[threadIdx.x / kWarp][f * kTileHeads + lane_head()] = found[f];  // The same from all of its lanes.
      __syncthreads();
      finder.write(staged, heads);
    }
    if (sums.sums != nullptr) {
      const std::uint64_t block = std::uint64_t{blockIdx.y} * cut.blocks + blockIdx.x;
      put_sums(weighed, staged_sums, heads, sums.sums + block * group + part.first_head + first);
    }
  }
}

/// Of rows of `total` tokens together, the longest of `longest`.
Cut cut_for(std::uint64_t total, std::uint32_t longest, std::uint32_t multiprocessors) {
  if (longest == 0) return {};
  return cut_of(static_cast<std::uint32_t>(div_up(total, longest)), longest, multiprocessors * kBlocksPerSm);
}

/// One fragment has room for four heads, and is enough, too, where thread blocks have one each: heads with a list of
/// their own, `grid.z` of them. Rows without lists beside those read their codes once for every four heads.
template <bool kForesees>
void launch(const TaskArray<ScoreInt4Task>& tasks, const Foresight& foresight, const ScoreSums& sums,
            const ScoreInt4Shape& shape, const Cut& cut, const dim3& grid, cudaStream_t stream) {
  const bool few = grid.z != 1 || shape.group <= kTileHeads;
  KernelHeadDims::with(shape.layout.head_dim, [&](auto dim) {
    OverlappingLaunch(grid, kThreads, 0, stream)
        .run(few ? score_int4_kernel<dim(), 1, kForesees> : score_int4_kernel<dim(), 2, kForesees>,
             "launch the score_int4 kernel", tasks, foresight, sums, shape, cut);
  });
}

}  // namespace

void launch_score_int4(const TaskArray<ScoreInt4Task>& tasks, const ScoreInt4Shape& shape, cudaStream_t stream) {
  std::uint64_t total = 0;
  std::uint32_t longest = 0;
  std::uint32_t heads = 1;
  bool tails = false;
  for (std::uint32_t i = 0; i < tasks.count; ++i) {
    const bool lists = tasks[i].lists != nullptr;
    const std::uint32_t row = tasks[i].estimates(shape.layout.page_tokens);
    tails |= tasks[i].tail_rows != 0;
    if (lists) heads = shape.group;
    total += std::uint64_t{row} * (lists ? shape.group : 1);
    longest = std::max(longest, row);
  }
  if (total == 0 && !tails) return;
  const Cut cut = cut_for(total, longest, shape.multiprocessors);
  launch<false>(tasks, {}, {}, shape, cut, dim3(cut.blocks + (tails ? 1 : 0), tasks.count, heads), stream);
}

void launch_score_int4(const ScoreInt4Task* tasks, std::uint32_t count, std::uint32_t longest, bool lists,
                       const Foresight& foresight, const ScoreSums& sums, const ScoreInt4Shape& shape,
                       cudaStream_t stream) {
  if (count == 0 || longest == 0) return;
  TaskArray<ScoreInt4Task> array;
  array.queued = tasks;
  array.count = count;
  const Cut cut = cut_for(std::uint64_t{count} * longest, longest, shape.multiprocessors);
  const dim3 grid(cut.blocks, count, lists ? shape.group : 1);
  if (foresight.bounds != nullptr && !lists) {
    launch<true>(array, foresight, sums, shape, cut, grid, stream);
  } else {
    launch<false>(array, {}, sums, shape, cut, grid, stream);
  }
}

std::uint32_t score_int4_blocks(std::uint32_t count, std::uint32_t longest, std::uint32_t multiprocessors) {
  if (count == 0) return 0;  // A forward of prompts alone.
  return cut_for(std::uint64_t{count} * longest, longest, multiprocessors).blocks;
}

std::uint32_t score_int4_most_blocks(std::uint32_t count, std::uint32_t longest, std::uint32_t multiprocessors) {
  return most_blocks(count, longest, multiprocessors * kBlocksPerSm);
}

void load_score_int4_kernels() {
  const auto load = [](auto* kernel) {
    load_kernel(kernel, "load the score_int4 kernels");
  };
  KernelHeadDims::each([&](std::uint32_t head_dim) {
    KernelHeadDims::with(head_dim, [&](auto dim) {
      load(score_int4_kernel<dim(), 1, false>);
      load(score_int4_kernel<dim(), 1, true>);
      load(score_int4_kernel<dim(), 2, false>);
      load(score_int4_kernel<dim(), 2, true>);
    });
  });
}

}  // namespace sluice::gpu
