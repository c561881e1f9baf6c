// FlexPrefill's verdict on every head.

#include <cmath>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_largest.cuh"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

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

/// Lines in blocks, if they were packed.
__device__ std::uint32_t filled_blocks(const LineCut& cut, const FlexLimits& limits) {
  const std::uint32_t blocks = (cut.count + kPrefillBlock - 1) / kPrefillBlock;
  return min(max(blocks, limits.least), limits.most);
}

/// One thread block per head: blockIdx.x.
__global__ void __launch_bounds__(kVerdictThreads) flex_verdict_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ float pooled[kFlexMaxBlocks];
  __shared__ VerdictReduce::Memory memory;
  VerdictReduce reduce(memory);
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint32_t head = blockIdx.x;
  const std::uint32_t blocks = item.key_blocks;
  const float* const columns = item.column_blocks + std::uint64_t{head} * blocks;
  const float* const offsets = item.offset_blocks + std::uint64_t{head} * blocks;
  std::uint8_t* const chosen = item.chosen + std::uint64_t{head} * 2 * blocks;

  const float total = pooled_attention(item, args, item.mean_query + head * args.head_dim, blocks, pooled, reduce);
  FlexVerdict verdict;
  verdict.divergence = distance(pooled, total, columns, blocks, reduce);
  verdict.query_aware = verdict.divergence < args.spec.tau ? 1 : 0;
  const FlexLimits limits = limits_of(args.spec, blocks);
  if (args.spec.lines && verdict.query_aware == 0) {
    const std::uint32_t* const marks = item.marks + std::uint64_t{head} * blocks;
    const auto column = [&](std::uint32_t i) { return i == 0 || (marks[i] & kMarkColumn) != 0; };
    const auto offset = [&](std::uint32_t i) {
      return i == 0 || (marks[i] & kMarkDiagonal) != 0 || (marks[i - 1] & kMarkSpill) != 0;
    };
    verdict.columns = choose_largest(chosen, columns, blocks, limits.least, limits.most, column, reduce);
    verdict.diagonals = choose_largest(chosen + blocks, offsets, blocks, limits.least, limits.most, offset, reduce);
  } else {
    const auto first = [](std::uint32_t i) { return i == 0; };
    const LineCut* const cuts = item.cuts + 2 * head;
    const bool fewest = verdict.query_aware != 0;  // Its query blocks choose the others.
    verdict.columns = choose_largest(chosen, columns, blocks, fewest ? limits.least : filled_blocks(cuts[0], limits),
                                     limits.most, first, reduce);
    verdict.diagonals =
        choose_largest(chosen + blocks, offsets, blocks, fewest ? limits.least : filled_blocks(cuts[1], limits),
                       limits.most, first, reduce);
  }
  if (threadIdx.x == 0) item.verdicts[head] = verdict;
}

}  // namespace

void launch_flex_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  const dim3 heads(args.group, extent.items);
  flex_verdict_kernel<<<heads, kVerdictThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the verdicts of select_blocks");
}

void load_flex_choose_kernels() {
  load_kernel(flex_verdict_kernel, "load the verdicts of select_blocks");
}

void launch_select_blocks(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap* pages,
                          cudaStream_t stream) {
  if (args.look != PromptLook::nothing) launch_flex_pool(args, extent, stream);
  if (args.look == PromptLook::attention) {
    launch_flex_scores(args, extent, pages, stream);
    launch_flex_sums(args, extent, stream);
  }
  if (args.look == PromptLook::nothing) {
    launch_streaming_choose(args, extent, stream);
  } else if (args.mode == PrefillMode::minference) {
    launch_minference_choose(args, extent, stream);
  } else {
    launch_flex_lines(args, extent, stream);
    launch_flex_choose(args, extent, stream);
  }
  launch_flex_masks(args, extent, stream);
}

void load_select_blocks_kernels() {
  load_flex_pool_kernels();
  load_flex_score_kernels();
  load_flex_hopper_kernels();
  load_flex_line_kernels();
  load_flex_choose_kernels();
  load_streaming_kernels();
  load_minference_kernels();
  load_flex_mask_kernels();
}

}  // namespace sluice::gpu
