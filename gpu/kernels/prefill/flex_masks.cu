// The masks of FlexPrefill's heads, and how many blocks they keep.

#include <cmath>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_block.cuh"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarps = kThreads / 32;
constexpr std::uint32_t kMaxDim = 128;
constexpr int kBlockBits = 13;
static_assert(kFlexMaxBlocks == 1u << kBlockBits);

/// Query blocks of a thread block: their mean queries share what is read of the mean keys. Their weights lie in shared
/// memory, which is why they are few where there are many keys.
constexpr std::uint32_t kManyRows = kWarps;
constexpr std::uint32_t kFewRows = 2;
constexpr std::uint32_t kManyRowsBlocks = 2560;  ///< key blocks at most with kManyRows

/// By one warp: the mean of the chunk's queries of one block. A lane has every 32nd element.
__device__ void mean_query(float* mean, const FlexItem& item, const FlexArgs& args, std::uint32_t head,
                           std::uint32_t block) {
  const std::uint32_t begin = max(item.first, block * kPrefillBlock) - item.first;
  const std::uint32_t end = min(item.keys, (block + 1) * kPrefillBlock) - item.first;
  const std::uint32_t lane = threadIdx.x % 32;
  float sums[kMaxDim / 32] = {};
  with_queries(item, args.shape, head, [&](const auto& load) {
#pragma unroll 8
    for (std::uint32_t token = begin; token < end; ++token) {
#pragma unroll
      for (std::uint32_t i = 0; i < kMaxDim / 32; ++i) {
        if (32 * i < args.head_dim) sums[i] += load(token, lane + 32 * i);
      }
    }
  });
#pragma unroll
  for (std::uint32_t i = 0; i < kMaxDim / 32; ++i) {
    if (32 * i < args.head_dim) mean[lane + 32 * i] = sums[i] / static_cast<float>(end - begin);
  }
}

/// Scores of all rows' queries and the first `blocks` mean keys into weights[kRows][stride]; -infinity for what is not
/// finite. A thread has every kThreads-th key.
template <std::uint32_t kRows>
__device__ void score_rows(float* weights, std::uint32_t stride, const float (&queries)[kRows][kMaxDim],
                           const FlexItem& item, const FlexArgs& args, std::uint32_t blocks) {
  for (std::uint32_t block = threadIdx.x; block < blocks; block += kThreads) {
    const float* const key = item.mean_keys + std::uint64_t{block} * args.head_dim;
    float dots[kRows] = {};
#pragma unroll 4
    for (std::uint32_t c = 0; c < args.head_dim; c += 4) {
      const float4 k = *reinterpret_cast<const float4*>(key + c);
#pragma unroll
      for (std::uint32_t row = 0; row < kRows; ++row) {
        const float4 q = *reinterpret_cast<const float4*>(&queries[row][c]);
        dots[row] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dots[row]))));
      }
    }
#pragma unroll
    for (std::uint32_t row = 0; row < kRows; ++row) {
      weights[row * stride + block] = fabsf(dots[row]) < INFINITY ? dots[row] * args.score_scale : -INFINITY;
    }
  }
}

/// By one warp: scores become weights relative to the largest. Returns their sum.
__device__ float soften(float* scores, std::uint32_t blocks) {
  float top = -INFINITY;
  for (std::uint32_t i = threadIdx.x % 32; i < blocks; i += 32) top = fmaxf(top, scores[i]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  float sum = 0.f;
  for (std::uint32_t i = threadIdx.x % 32; i < blocks; i += 32) {
    scores[i] = scores[i] == -INFINITY ? 0.f : expf(scores[i] - top);
    sum += scores[i];
  }
  return over_lanes(sum);
}

/// By one warp: the fewest of the blocks with a share of gamma of their scores' softmax, or `most` of them, if these
/// are fewer. The scores become weights.
__device__ LineCut fewest_blocks(float* scores, std::uint32_t blocks, float gamma, std::uint32_t most) {
  const float total = soften(scores, blocks);
  if (!(total > 0.f)) return {};
  const auto sum_if = [&](const auto& counts, auto value) {
    decltype(value(0.f)) sum = 0;
    for (std::uint32_t i = threadIdx.x % 32; i < blocks; i += 32) {
      if (counts(__float_as_uint(scores[i]), i)) sum += value(scores[i]);
    }
    return over_lanes(sum);
  };
  const auto weight = [](float x) { return x; };
  const auto one = [](float) { return 1u; };
  const float need = gamma * total;
  std::uint32_t least = 0;  // Which every weight is above that counts.
  if (gamma < 1.f) {
    least = largest_that<30>([&](std::uint32_t bits) {  // No weight is above 1.
      return sum_if([&](std::uint32_t other, std::uint32_t) { return other >= bits; }, weight) >= need;
    });
  }
  const auto first_ties = [&](std::uint32_t ties) {
    const std::uint32_t last_tie = largest_that<kBlockBits>([&](std::uint32_t end) {
      return sum_if([&](std::uint32_t other, std::uint32_t i) { return other == least && i < end; }, one) < ties;
    });
    return LineCut{.count = 0, .bits = least, .ties_end = last_tie + 1};
  };
  if (sum_if([&](std::uint32_t other, std::uint32_t) { return other > least; }, one) >= most) {
    least = largest_that<30>([&](std::uint32_t bits) {
      return sum_if([&](std::uint32_t other, std::uint32_t) { return other >= bits; }, one) >= most;
    });
    return first_ties(most - sum_if([&](std::uint32_t other, std::uint32_t) { return other > least; }, one));
  }
  if (gamma >= 1.f) return {};
  const float above = sum_if([&](std::uint32_t other, std::uint32_t) { return other > least; }, weight);
  const std::uint32_t equal = sum_if([&](std::uint32_t other, std::uint32_t) { return other == least; }, one);
  const float lacking = ceilf((need - above) / __uint_as_float(least));
  const std::uint32_t room = most - sum_if([&](std::uint32_t other, std::uint32_t) { return other > least; }, one);
  const std::uint32_t ties = min(min(max(static_cast<std::uint32_t>(fminf(lacking, 1e9f)), 1u), equal), room);
  if (ties == equal) return {.count = 0, .bits = least, .ties_end = kFlexMaxBlocks};
  return first_ties(ties);
}

/// By one warp: the mask of one query block. `weights` are null unless the head is query-aware.
__device__ void write_mask(const FlexItem& item, std::uint32_t head, std::uint32_t row, const float* weights,
                           const LineCut& cut) {
  const std::uint32_t own = item.first / kPrefillBlock + row;
  const std::uint8_t* const columns = item.chosen + std::uint64_t{head} * 2 * item.key_blocks;
  const std::uint8_t* const offsets = columns + item.key_blocks;
  const std::uint64_t at = std::uint64_t{head} * item.query_blocks + row;
  std::uint32_t kept = 0;
#pragma unroll 4
  for (std::uint32_t word = 0; word < item.words; ++word) {
    const std::uint32_t block = word * 32 + threadIdx.x % 32;
    bool keep = block == 0 || block == own;
    if (block <= own) {
      keep |= columns[block] != 0 || offsets[own - block] != 0;
      if (weights != nullptr) {
        const std::uint32_t bits = __float_as_uint(weights[block]);
        keep |= bits > cut.bits || (bits == cut.bits && block < cut.ties_end);
      }
    }
    const std::uint32_t bits = __ballot_sync(kAllLanes, keep);
    if (threadIdx.x % 32 == 0) item.blocks[at * item.words + word] = bits;
    kept += static_cast<std::uint32_t>(__popc(static_cast<int>(bits)));
  }
  if (threadIdx.x % 32 == 0) item.row_kept[at] = kept;
}

/// One thread block per kRows query blocks, blockIdx.x, and head, blockIdx.y.
template <std::uint32_t kRows>
__global__ void __launch_bounds__(kThreads) flex_mask_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ alignas(16) float queries[kRows][kMaxDim];
  extern __shared__ float weights[];  // [kRows][key blocks]
  const FlexItem& item = args.items[blockIdx.z];
  const std::uint32_t first = blockIdx.x * kRows;
  if (first >= item.query_blocks) return;
  const std::uint32_t rows = min(kRows, item.query_blocks - first);
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t own = item.first / kPrefillBlock + first;
  const std::uint32_t warp = threadIdx.x / 32;
  const bool query_aware = item.verdicts[head].query_aware != 0;
  if (query_aware) {
    if (warp < rows) {
      mean_query(queries[warp], item, args, head, own + warp);
    } else if (warp < kRows) {
      for (std::uint32_t i = threadIdx.x % 32; i < kMaxDim; i += 32) queries[warp][i] = 0.f;
    }
    __syncthreads();
    score_rows<kRows>(weights, item.key_blocks, queries, item, args, own + rows);
    __syncthreads();
  }
  if (warp >= rows) return;
  float* const mine = query_aware ? weights + std::uint64_t{warp} * item.key_blocks : nullptr;
  LineCut cut;
  if (query_aware) {
    cut = fewest_blocks(mine, own + warp + 1, args.spec.gamma, limits_of(args.spec, item.key_blocks).most);
  }
  __syncwarp();
  write_mask(item, head, first + warp, mine, cut);
}

/// One warp per head: blockIdx.x.
__global__ void flex_tally_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint32_t head = blockIdx.x;
  const std::uint64_t top = item.first / kPrefillBlock;
  std::uint64_t kept = 0;
  for (std::uint32_t row = threadIdx.x; row < item.query_blocks; row += 32) {
    kept += item.row_kept[std::uint64_t{head} * item.query_blocks + row];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) kept += __shfl_xor_sync(kAllLanes, kept, step);
  if (threadIdx.x != 0) return;
  const FlexVerdict verdict = item.verdicts[head];
  const std::uint64_t rows = item.query_blocks;
  item.choices[head] = {.divergence = verdict.divergence,
                        .query_aware = verdict.query_aware,
                        .columns = verdict.columns,
                        .diagonals = verdict.diagonals,
                        .kept = kept,
                        .causal = rows * top + rows * (rows + 1) / 2,
                        .pattern = verdict.pattern};
}

/// Calls `use` with the kernel for so many key blocks, its rows and the shared memory that it needs.
template <class Use>
void with_kernel(std::uint32_t key_blocks, const Use& use) {
  const auto bytes = [&](std::uint32_t rows) { return static_cast<int>(rows * key_blocks * sizeof(float)); };
  key_blocks <= kManyRowsBlocks ? use(flex_mask_kernel<kManyRows>, kManyRows, bytes(kManyRows))
                                : use(flex_mask_kernel<kFewRows>, kFewRows, bytes(kFewRows));
}

}  // namespace

void launch_flex_masks(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  with_kernel(extent.key_blocks, [&](auto* kernel, std::uint32_t rows, int shared_bytes) {
    const dim3 grid((extent.query_blocks + rows - 1) / rows, args.group, extent.items);
    kernel<<<grid, kThreads, shared_bytes, stream>>>(args);
  });
  check(cudaGetLastError(), "launch the masks of select_blocks");
  flex_tally_kernel<<<dim3(args.group, extent.items), 32, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the tally of select_blocks");
}

void load_flex_mask_kernels() {
  for (const std::uint32_t key_blocks : {kManyRowsBlocks, kFlexMaxBlocks}) {
    with_kernel(key_blocks, [](auto* kernel, std::uint32_t, int shared_bytes) {
      load_kernel(kernel, "load the masks of select_blocks", shared_bytes);
    });
  }
  load_kernel(flex_tally_kernel, "load the tally of select_blocks");
}

}  // namespace sluice::gpu
