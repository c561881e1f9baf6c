// When the stages of a traced forward run.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/wait.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

/// One thread.
__global__ void stamp_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer, std::uint32_t stage) {
  const ForwardState& state = *m.state;
  if (state.status != ForwardStatus::running) return;
  m.stamps_of(state.forward, layer)[stage] = {.forward = state.forward, .ns = forward::now_ns()};
}

/// One thread. The end of the first window, and the lengths of the others: a sum of ends less beginnings, modulo 2^64.
__global__ void gather_stamp_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer, bool first,
                                    GatherMark mark) {
  const ForwardState& state = *m.state;
  if (state.status != ForwardStatus::running) return;
  ForwardStamp& stamp = m.stamps_of(state.forward, layer)[static_cast<std::uint32_t>(Stage::gather)];
  const std::uint64_t now = forward::now_ns();
  if (first) {
    stamp = {.forward = state.forward, .ns = now};
  } else {
    stamp.ns = mark == GatherMark::begins ? stamp.ns - now : stamp.ns + now;
  }
}

}  // namespace

void launch_forward_gather_stamp(const ForwardMemory& memory, std::uint32_t layer, std::uint32_t window,
                                 GatherMark mark, cudaStream_t stream) {
  if (window == 0 && mark == GatherMark::begins) return;  // It begins when the stage before it ends.
  gather_stamp_kernel<<<1, 1, 0, stream>>>(memory, layer, window == 0, mark);
  check(cudaGetLastError(), "launch the kernel that stamps a window of a prompt");
}

void launch_forward_stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, cudaStream_t stream) {
  stamp_kernel<<<1, 1, 0, stream>>>(memory, layer, static_cast<std::uint32_t>(stage));
  check(cudaGetLastError(), "launch the kernel that stamps a stage");
}

namespace detail {
void load_forward_stamp_kernel() {
  load_kernel(stamp_kernel, "load the kernel that stamps a stage");
  load_kernel(gather_stamp_kernel, "load the kernel that stamps a window of a prompt");
}
}  // namespace detail

}  // namespace sluice::gpu
