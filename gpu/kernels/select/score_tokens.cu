#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/select/score.cuh"

namespace sluice::gpu {
namespace {

using namespace scoring;

constexpr std::uint32_t kTokensAtOnce = 4;

/// One thread block per task (blockIdx.y) and slice of its tokens (blockIdx.x).
template <DType kType, std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kThreads) score_tokens_kernel(const __grid_constant__ TaskArray<TokenRows> tasks,
                                                                std::uint32_t group, std::uint32_t slice, float scale) {
  using Tile = Tiling<kHeadDim, kTokensAtOnce>;
  extern __shared__ float4 memory[];
  __shared__ TokenRows task;
  if (threadIdx.x == 0) task = tasks[blockIdx.y];
  __syncthreads();
  const std::uint32_t begin = blockIdx.x * slice;
  if (begin >= task.count) return;
  const std::uint32_t count = min(slice, task.count - begin);
  const Staged staged(reinterpret_cast<float*>(memory), group, kHeadDim, slice);
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) staged.rows[i] = task.rows[begin + i];
  stage_queries<kHeadDim>(task.q, group, scale, staged.q);
  __syncthreads();

  const std::uint32_t lane = threadIdx.x % Tile::kLanes;
  const std::uint32_t first = threadIdx.x / Tile::kLanes * kTokensAtOnce;
  for (std::uint32_t at = 0; at < count; at += Tile::kBlockRows) {
    uint4 words[kTokensAtOnce];
    float k[kTokensAtOnce][kUnit];
#pragma unroll
    for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) {
      const std::uint64_t row = staged.rows[min(at + first + t, count - 1)];
      if (!std::has_single_bit(kHeadDim)) words[t] = {};
      if (std::has_single_bit(kHeadDim) || lane < kHeadDim / kUnit)
        words[t] = load_unit_once(task.base + row * (kHeadDim * 2) + lane * sizeof(uint4));
    }
#pragma unroll
    for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) detail::widen_unit<kType>(words[t], k[t]);
    const std::uint32_t token = at + first + lane / (Tile::kLanes / kTokensAtOnce);
    const bool writes = lane % (Tile::kLanes / kTokensAtOnce) == 0 && token < count;
    for (std::uint32_t head = 0; head < group; ++head) {
      float q[kUnit];
      float sums[kTokensAtOnce] = {};
      load_query<kHeadDim>(staged.q + head * kHeadDim, lane, q);
#pragma unroll
      for (std::uint32_t c = 0; c < kUnit; ++c) {
#pragma unroll
        for (std::uint32_t t = 0; t < kTokensAtOnce; ++t) sums[t] = fmaf(q[c], k[t][c], sums[t]);
      }
      const float score = sum_over_lanes<kTokensAtOnce, Tile::kLanes>(sums, lane);
      if (writes) staged.out[token * group + head] = score;
    }
  }
  __syncthreads();
  float* const out = task.out + std::uint64_t{begin} * group;
  for (std::uint32_t i = threadIdx.x; i < count * group; i += kThreads) out[i] = staged.out[i];
}

}  // namespace

void launch_score_tokens(const TaskArray<TokenRows>& tasks, const ScoreShape& shape, cudaStream_t stream) {
  std::uint64_t total = 0;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < tasks.count; ++i) {
    total += tasks[i].count;
    longest = std::max(longest, tasks[i].count);
  }
  if (total == 0) return;
  for_shape(shape, [&]<DType kType, std::uint32_t kHeadDim>() {
    const std::uint32_t slice =
        slice_for(total, Tiling<kHeadDim, kTokensAtOnce>::kBlockRows, kMaxSlice<kHeadDim>, shape.multiprocessors);
    const dim3 grid(static_cast<std::uint32_t>(div_up(longest, slice)), tasks.count);
    const std::uint32_t shared = Staged::bytes(shape.group, kHeadDim, slice);
    score_tokens_kernel<kType, kHeadDim><<<grid, kThreads, shared, stream>>>(tasks, shape.group, slice, shape.scale);
  });
  check(cudaGetLastError(), "launch the score_tokens kernel");
}

void load_score_tokens_kernels() {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    KernelHeadDims::each([&](std::uint32_t head_dim) {
      for_shape({.dtype = dtype, .head_dim = head_dim}, [&]<DType kType, std::uint32_t kHeadDim>() {
        load_kernel(score_tokens_kernel<kType, kHeadDim>, "load a score_tokens kernel");
      });
    });
  }
}

}  // namespace sluice::gpu
