// StreamingLLM's mask over prompts: attention sinks and a window, of every head.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_largest.cuh"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr std::uint32_t kThreads = 256;

/// One thread block per head: blockIdx.x.
__global__ void __launch_bounds__(kThreads) streaming_verdict_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint32_t blocks = item.key_blocks;
  const WindowBlocks window = window_blocks(args.minference.a_shape, blocks);
  choose_window(item.chosen + std::uint64_t{blockIdx.x} * 2 * blocks, window, blocks);
  if (threadIdx.x == 0)
    item.verdicts[blockIdx.x] = {
        .columns = window.columns, .diagonals = window.offsets, .pattern = HeadPattern::a_shape};
}

}  // namespace

void launch_streaming_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  streaming_verdict_kernel<<<dim3(args.group, extent.items), kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the window of select_blocks");
}

void load_streaming_kernels() { load_kernel(streaming_verdict_kernel, "load the window of select_blocks"); }

}  // namespace sluice::gpu
