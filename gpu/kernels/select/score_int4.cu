// Estimated logits from copies of keys in codes of 4 or 3 bits, on tensor cores. The few keys of a tail are a thread
// block's of their own.

#include <algorithm>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/score_int4_block.cuh"

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

/// Thread block x of the cut, or behind these the tail, of task y, and of its head z where each has a list.
template <std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments, bool kForesees>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    score_int4_kernel(const __grid_constant__ TaskArray<ScoreInt4Task> tasks,
                      const __grid_constant__ Foresight foresight, const ScoreInt4Shape shape, Cut cut) {
  __shared__ Shared<kHeadDim> s;
  detail::wait_for_kernel_before();
  if (threadIdx.x == 0) s.task = tasks[blockIdx.y];
  __syncthreads();
  const Part part = part_of(s.task, shape.group, shape.layout.page_tokens, cut);
  if (part.block == cut.blocks) return score_tail<kHeadDim>(s.task, part, shape.dtype, shape.scale);
  score_part<kHeadDim, kBits, kFragments, kForesees>(s, part, blockIdx.y, QueryRows<kHeadDim>{s.task.q}, foresight,
                                                     shape, cut);
}

/// Of rows of `total` tokens together, the longest of `longest`.
Cut cut_for(std::uint64_t total, std::uint32_t longest, std::uint32_t multiprocessors) {
  if (longest == 0) return {};
  return cut_of(static_cast<std::uint32_t>(div_up(total, longest)), longest, multiprocessors * kBlocksPerSm);
}

/// One fragment has room for four heads, and is enough, too, where thread blocks have one each: heads with a list of
/// their own, `grid.z` of them. Rows without lists beside those read their codes once for every four heads.
template <bool kForesees>
void launch(const TaskArray<ScoreInt4Task>& tasks, const Foresight& foresight, const ScoreInt4Shape& shape,
            const Cut& cut, const dim3& grid, cudaStream_t stream) {
  const bool few = grid.z != 1 || shape.group <= kTileHeads;
  KernelHeadDims::with(shape.layout.head_dim, [&](auto dim) {
    with_bits(shape.layout.bits, [&](auto bits) {
      OverlappingLaunch(grid, kThreads, 0, stream)
          .run(few ? score_int4_kernel<dim(), bits(), 1, kForesees> : score_int4_kernel<dim(), bits(), 2, kForesees>,
               "launch the score_int4 kernel", tasks, foresight, shape, cut);
    });
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
  launch<false>(tasks, {}, shape, cut, dim3(cut.blocks + (tails ? 1 : 0), tasks.count, heads), stream);
}

void launch_score_int4(const ScoreInt4Task* tasks, std::uint32_t count, std::uint32_t longest, bool lists,
                       const Foresight& foresight, const ScoreInt4Shape& shape, cudaStream_t stream) {
  if (count == 0 || longest == 0) return;
  TaskArray<ScoreInt4Task> array;
  array.queued = tasks;
  array.count = count;
  const Cut cut = cut_for(std::uint64_t{count} * longest, longest, shape.multiprocessors);
  const dim3 grid(cut.blocks, count, lists ? shape.group : 1);
  if (foresight.bounds != nullptr && !lists) {
    launch<true>(array, foresight, shape, cut, grid, stream);
  } else {
    launch<false>(array, {}, shape, cut, grid, stream);
  }
}

void load_score_int4_kernels() {
  const auto load = [](auto* kernel) {
    load_kernel(kernel, "load the score_int4 kernels");
  };
  KernelHeadDims::each([&](std::uint32_t head_dim) {
    KernelHeadDims::with(head_dim, [&](auto dim) {
      for (const std::uint32_t each : {kCodeBits, kFewCodeBits}) {
        with_bits(each, [&](auto bits) {
          load(score_int4_kernel<dim(), bits(), 1, false>);
          load(score_int4_kernel<dim(), bits(), 1, true>);
          load(score_int4_kernel<dim(), bits(), 2, false>);
          load(score_int4_kernel<dim(), bits(), 2, true>);
        });
      }
    });
  });
}

}  // namespace sluice::gpu
