// MInference's pattern of every head: columns and diagonals that the last queries attend most, an A-shape, blocks that
// every query block chooses by pooled scores, or what holds most of what the last queries attend.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_largest.cuh"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

/// A head of an item.
struct Head {
  const float* columns;  ///< [blocks] what the last queries attend of each
  const float* offsets;  ///< [blocks]
  std::uint8_t* chosen;  ///< [2, blocks]
  std::uint32_t blocks;
};

/// What lies in the blocks of the last query block that `kept` names. A thread asks for every kVerdictThreads-th.
template <class Kept>
__device__ float held(const Head& head, const Kept& kept, VerdictReduce& reduce) {
  float sum = 0.f;
  for (std::uint32_t block = threadIdx.x; block < head.blocks; block += kVerdictThreads) {
    if (kept(block)) sum += head.columns[block];
  }
  return reduce.sum(sum);
}

__device__ WindowBlocks choose_lines(const Head& head, const MInferenceSpec& by, VerdictReduce& reduce) {
  const auto first = [](std::uint32_t i) { return i == 0; };
  const auto wanted = [&](std::uint32_t tokens) { return max(1u, min(prefill_blocks_of(tokens), head.blocks)); };
  return {
      .columns = choose_largest(head.chosen, head.columns, head.blocks, wanted(by.columns), head.blocks, first, reduce),
      .offsets = choose_largest(head.chosen + head.blocks, head.offsets, head.blocks, wanted(by.diagonals), head.blocks,
                                first, reduce)};
}

/// Leaves the blocks of columns and diagonals in `chosen`. All threads return the same.
__device__ HeadPattern best_pattern(const Head& head, const FlexItem& item, const FlexArgs& args, const float* query,
                                    float* pooled, VerdictReduce& reduce) {
  const MInferenceSpec& by = args.minference;
  const std::uint32_t own = head.blocks - 1;
  const WindowBlocks window = window_blocks(by.a_shape, head.blocks);
  const float a_shape = held(
      head, [&](std::uint32_t block) { return block < window.columns || own - block < window.offsets; }, reduce);
  pooled_attention(item, args, query, head.blocks, pooled, reduce);
  choose_largest(
      head.chosen, pooled, head.blocks, min(prefill_blocks_of(by.blocks), head.blocks), head.blocks,
      [](std::uint32_t) { return false; }, reduce);
  const float block_sparse = held(
      head,
      [&](std::uint32_t block) {
        return block == 0 || block == own || (head.chosen[block] != 0 && pooled[block] > 0.f);
      },
      reduce);
  choose_lines(head, by, reduce);
  __syncthreads();
  const float vertical_slash = held(
      head, [&](std::uint32_t block) { return head.chosen[block] != 0 || head.chosen[head.blocks + own - block] != 0; },
      reduce);
  const float enough = fmaxf(fmaxf(a_shape, vertical_slash), block_sparse) - kPatternMargin;
  return a_shape >= enough          ? HeadPattern::a_shape
         : vertical_slash >= enough ? HeadPattern::vertical_slash
                                    : HeadPattern::block_sparse;
}

/// One thread block per head: blockIdx.x.
__global__ void __launch_bounds__(kVerdictThreads) minference_verdict_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ float pooled[kFlexMaxBlocks];
  __shared__ VerdictReduce::Memory memory;
  VerdictReduce reduce(memory);
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint64_t at = std::uint64_t{blockIdx.x} * item.key_blocks;
  const Head head{.columns = item.column_blocks + at,
                  .offsets = item.offset_blocks + at,
                  .chosen = item.chosen + 2 * at,
                  .blocks = item.key_blocks};
  FlexVerdict verdict{.pattern = args.minference.pattern};
  if (verdict.pattern == HeadPattern::best) {
    verdict.pattern = best_pattern(head, item, args, item.mean_query + blockIdx.x * args.head_dim, pooled, reduce);
  }
  WindowBlocks chosen{};
  if (verdict.pattern == HeadPattern::vertical_slash) {
    chosen = choose_lines(head, args.minference, reduce);
  } else {
    const bool of_rows = verdict.pattern == HeadPattern::block_sparse;
    verdict.query_aware = of_rows ? 1 : 0;  // Its query blocks choose all but the first and their own.
    chosen =
        window_blocks(of_rows ? StreamingPrefillSpec{.sinks = 1, .window = 1} : args.minference.a_shape, head.blocks);
    choose_window(head.chosen, chosen, head.blocks);
  }
  verdict.columns = chosen.columns;
  verdict.diagonals = chosen.offsets;
  if (threadIdx.x == 0) item.verdicts[blockIdx.x] = verdict;
}

}  // namespace

void launch_minference_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  minference_verdict_kernel<<<dim3(args.group, extent.items), kVerdictThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the patterns of select_blocks");
}

void load_minference_kernels() { load_kernel(minference_verdict_kernel, "load the patterns of select_blocks"); }

}  // namespace sluice::gpu
