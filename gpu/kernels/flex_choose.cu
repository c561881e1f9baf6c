// FlexPrefill's verdict on every head, and the masks that follow from it.

#include <cmath>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/flex.hpp"
#include "gpu/kernels/flex_block.cuh"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr int kVerdictThreads = 1024;
constexpr int kMaskThreads = 256;
constexpr std::uint32_t kHeld = kFlexMaxBlocks / kVerdictThreads;  ///< blocks of a thread
constexpr int kBlockBits = 13;
static_assert(kFlexMaxBlocks == 1u << kBlockBits);

using VerdictReduce = BlockReduce<kVerdictThreads>;
using MaskReduce = BlockReduce<kMaskThreads>;

/// How many blocks of columns, and of offsets, a head may have.
struct Limits {
  std::uint32_t least;
  std::uint32_t most;
};
__device__ Limits limits_of(const FlexPrefillSpec& spec, std::uint32_t blocks) {
  const auto in_blocks = [](std::uint32_t tokens) {
    return tokens / kPrefillBlock + (tokens % kPrefillBlock != 0 ? 1u : 0u);
  };
  Limits limits;
  limits.least = max(1u, min(in_blocks(spec.min_budget), blocks));
  limits.most = spec.max_budget == 0 ? blocks : max(limits.least, min(in_blocks(spec.max_budget), blocks));
  return limits;
}

/// Jensen-Shannon distance of the pooled attention, pooled / total, and the representative rows' own.
__device__ float distance(const float* pooled, float total, const float* actual, std::uint32_t blocks,
                          VerdictReduce& reduce) {
  double sum = 0.0;
  for (std::uint32_t i = threadIdx.x; i < blocks; i += kVerdictThreads) {
    const double p = total > 0.f ? static_cast<double>(pooled[i]) / static_cast<double>(total) : 0.0;
    const double q = actual[i];
    const double middle = (p + q) / 2.0;
    if (p > 0.0) sum += p * log(p / middle);
    if (q > 0.0) sum += q * log(q / middle);
  }
  return static_cast<float>(sqrt(fmax(0.5 * reduce.sum(sum), 0.0)));
}

/// Writes 1 for the `wanted` blocks with the largest sums, those that are forced before all, and 0 for the others.
/// Equal sums: the lower index first. `forced` may be more than `wanted`. Returns how many.
template <class Forced>
__device__ std::uint32_t choose_largest(std::uint8_t* chosen, const float* sums, std::uint32_t blocks,
                                        std::uint32_t wanted, const Forced& forced, VerdictReduce& reduce) {
  std::uint32_t keys[kHeld];  // Sums have no sign, so that their bits are in their order. 0 behind the last block.
  std::uint32_t forced_here = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kHeld; ++i) {
    const std::uint32_t block = threadIdx.x + i * kVerdictThreads;
    keys[i] = block < blocks ? __float_as_uint(sums[block]) : 0;
    if (block < blocks && forced(block)) {
      keys[i] = 0xffff'ffffu;
      ++forced_here;
    }
  }
  wanted = max(wanted, reduce.sum(forced_here));
  const auto count = [&](const auto& counts) {
    std::uint32_t here = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) here += counts(keys[i], threadIdx.x + i * kVerdictThreads) ? 1u : 0u;
    return reduce.sum(here);
  };
  const std::uint32_t least = largest_that<32>([&](std::uint32_t key) {
    return count([&](std::uint32_t other, std::uint32_t) { return other >= key; }) >= wanted;
  });
  const std::uint32_t ties = wanted - count([&](std::uint32_t other, std::uint32_t) { return other > least; });
  const std::uint32_t last_tie = largest_that<kBlockBits>([&](std::uint32_t end) {
    return count([&](std::uint32_t other, std::uint32_t block) { return other == least && block < end; }) < ties;
  });
#pragma unroll
  for (std::uint32_t i = 0; i < kHeld; ++i) {
    const std::uint32_t block = threadIdx.x + i * kVerdictThreads;
    if (block < blocks) chosen[block] = keys[i] > least || (keys[i] == least && block <= last_tie) ? 1 : 0;
  }
  return wanted;
}

/// Lines in blocks, if they were packed.
__device__ std::uint32_t filled_blocks(const LineCut& cut, const Limits& limits) {
  const std::uint32_t blocks = (cut.count + kPrefillBlock - 1) / kPrefillBlock;
  return min(max(blocks, limits.least), limits.most);
}

/// One thread block per head: blockIdx.x.
__global__ void __launch_bounds__(kVerdictThreads) flex_verdict_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ float pooled[kFlexMaxBlocks];
  __shared__ VerdictReduce::Memory memory;
  VerdictReduce reduce(memory);
  const FlexItem& item = args.items[blockIdx.y];
  const std::uint32_t head = blockIdx.x;
  const std::uint32_t blocks = item.key_blocks;
  const float* const columns = item.column_blocks + std::uint64_t{head} * blocks;
  const float* const offsets = item.offset_blocks + std::uint64_t{head} * blocks;
  std::uint8_t* const chosen = item.chosen + std::uint64_t{head} * 2 * blocks;

  const float total = pooled_attention(item, args, item.mean_query + head * args.head_dim, blocks, pooled, reduce);
  FlexVerdict verdict;
  verdict.divergence = distance(pooled, total, columns, blocks, reduce);
  verdict.query_aware = verdict.divergence < args.spec.tau ? 1 : 0;
  const Limits limits = limits_of(args.spec, blocks);
  if (args.spec.lines && verdict.query_aware == 0) {
    const std::uint32_t* const marks = item.marks + std::uint64_t{head} * blocks;
    const auto column = [&](std::uint32_t i) { return i == 0 || (marks[i] & kMarkColumn) != 0; };
    const auto offset = [&](std::uint32_t i) {
      return i == 0 || (marks[i] & kMarkDiagonal) != 0 || (marks[i - 1] & kMarkSpill) != 0;
    };
    verdict.columns = choose_largest(chosen, columns, blocks, limits.least, column, reduce);
    verdict.diagonals = choose_largest(chosen + blocks, offsets, blocks, limits.least, offset, reduce);
  } else {
    const auto first = [](std::uint32_t i) { return i == 0; };
    const LineCut* const cuts = item.cuts + 2 * head;
    const bool fewest = verdict.query_aware != 0;  // Its query blocks choose the others.
    verdict.columns =
        choose_largest(chosen, columns, blocks, fewest ? limits.least : filled_blocks(cuts[0], limits), first, reduce);
    verdict.diagonals = choose_largest(chosen + blocks, offsets, blocks,
                                       fewest ? limits.least : filled_blocks(cuts[1], limits), first, reduce);
  }
  if (threadIdx.x == 0) item.verdicts[head] = verdict;
}

struct MaskMemory {
  float weights[kFlexMaxBlocks];
  float sums[kMaskThreads];
  float query[kMaskThreads];
  MaskReduce::Memory reduce;
};

/// Mean of the chunk's queries of one block, into memory.query.
__device__ void mean_query(MaskMemory& memory, const FlexItem& item, const FlexArgs& args, std::uint32_t head,
                           std::uint32_t block) {
  const std::uint32_t begin = max(item.first, block * kPrefillBlock) - item.first;
  const std::uint32_t end = min(item.keys, (block + 1) * kPrefillBlock) - item.first;
  const std::uint32_t c = threadIdx.x % args.head_dim;
  const std::uint32_t turns = kMaskThreads / args.head_dim;
  float sum = 0.f;
#pragma unroll 4
  for (std::uint32_t token = begin + threadIdx.x / args.head_dim; token < end; token += turns) {
    sum += load_query(item, args.shape, token, head, c);
  }
  memory.sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < args.head_dim) {
    for (std::uint32_t i = 1; i < turns; ++i) sum += memory.sums[i * args.head_dim + c];
    memory.query[c] = sum / static_cast<float>(end - begin);
  }
  __syncthreads();
}

/// The fewest key blocks, up to the query block's own, with a share of gamma of its pooled attention.
__device__ LineCut fewest_blocks(MaskMemory& memory, const FlexItem& item, const FlexArgs& args, std::uint32_t head,
                                 std::uint32_t block) {
  MaskReduce reduce(memory.reduce);
  mean_query(memory, item, args, head, block);
  const std::uint32_t blocks = block + 1;
  const float total = pooled_attention(item, args, memory.query, blocks, memory.weights, reduce);
  if (!(total > 0.f) || args.spec.gamma >= 1.f) return {};
  const auto sum_if = [&](const auto& counts, auto value) {
    decltype(value(0.f)) sum = 0;
    for (std::uint32_t i = threadIdx.x; i < blocks; i += kMaskThreads) {
      if (counts(__float_as_uint(memory.weights[i]), i)) sum += value(memory.weights[i]);
    }
    return reduce.sum(sum);
  };
  const auto weight = [](float x) { return x; };
  const auto one = [](float) { return 1u; };
  const float need = args.spec.gamma * total;
  const std::uint32_t least = largest_that<31>([&](std::uint32_t bits) {
    return sum_if([&](std::uint32_t other, std::uint32_t) { return other >= bits; }, weight) >= need;
  });
  const float above = sum_if([&](std::uint32_t other, std::uint32_t) { return other > least; }, weight);
  const std::uint32_t equal = sum_if([&](std::uint32_t other, std::uint32_t) { return other == least; }, one);
  const float lacking = ceilf((need - above) / __uint_as_float(least));
  const std::uint32_t ties = min(max(static_cast<std::uint32_t>(fminf(lacking, 1e9f)), 1u), equal);
  const std::uint32_t last_tie = largest_that<kBlockBits>([&](std::uint32_t end) {
    return sum_if([&](std::uint32_t other, std::uint32_t i) { return other == least && i < end; }, one) < ties;
  });
  return {.count = 0, .bits = least, .ties_end = last_tie + 1};
}

/// One thread block per query block, blockIdx.x, and head, blockIdx.y.
__global__ void __launch_bounds__(kMaskThreads) flex_mask_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ MaskMemory memory;
  const FlexItem& item = args.items[blockIdx.z];
  if (blockIdx.x >= item.query_blocks) return;
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t own = item.first / kPrefillBlock + blockIdx.x;
  const bool query_aware = item.verdicts[head].query_aware != 0;
  LineCut cut;
  if (query_aware) cut = fewest_blocks(memory, item, args, head, own);
  const std::uint8_t* const columns = item.chosen + std::uint64_t{head} * 2 * item.key_blocks;
  const std::uint8_t* const offsets = columns + item.key_blocks;
  const std::uint64_t row = std::uint64_t{head} * item.query_blocks + blockIdx.x;
  std::uint32_t kept = 0;
  for (std::uint32_t word = threadIdx.x / 32; word < item.words; word += kMaskThreads / 32) {
    const std::uint32_t block = word * 32 + threadIdx.x % 32;
    bool keep = block == 0 || block == own;
    if (block <= own) {
      keep |= columns[block] != 0 || offsets[own - block] != 0;
      if (query_aware) {
        const std::uint32_t bits = __float_as_uint(memory.weights[block]);
        keep |= bits > cut.bits || (bits == cut.bits && block < cut.ties_end);
      }
    }
    const std::uint32_t bits = __ballot_sync(kAllLanes, keep);
    if (threadIdx.x % 32 != 0) continue;
    item.blocks[row * item.words + word] = bits;
    kept += static_cast<std::uint32_t>(__popc(static_cast<int>(bits)));
  }
  __syncthreads();  // The reduction takes its turns from the beginning.
  kept = MaskReduce(memory.reduce).sum(kept);
  if (threadIdx.x == 0) item.row_kept[row] = kept;
}

/// One warp per head: blockIdx.x.
__global__ void flex_tally_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.y];
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
                        .causal = rows * top + rows * (rows + 1) / 2};
}

}  // namespace

void launch_flex_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  const dim3 heads(args.group, extent.items);
  flex_verdict_kernel<<<heads, kVerdictThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the verdicts of select_blocks");
  flex_mask_kernel<<<dim3(extent.query_blocks, args.group, extent.items), kMaskThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the masks of select_blocks");
  flex_tally_kernel<<<heads, 32, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the tally of select_blocks");
}

void load_flex_choose_kernels() {
  cudaFuncAttributes attributes{};
  for (void (*const kernel)(FlexArgs) : {flex_verdict_kernel, flex_mask_kernel, flex_tally_kernel}) {
    check(cudaFuncGetAttributes(&attributes, kernel), "load the choosing kernels of select_blocks");
  }
}

void launch_select_blocks(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  launch_flex_pool(args, extent, stream);
  launch_flex_scores(args, extent, stream);
  launch_flex_sums(args, extent, stream);
  launch_flex_lines(args, extent, stream);
  launch_flex_choose(args, extent, stream);
}

void load_select_blocks_kernels() {
  load_flex_pool_kernels();
  load_flex_score_kernels();
  load_flex_line_kernels();
  load_flex_choose_kernels();
}

}  // namespace sluice::gpu
