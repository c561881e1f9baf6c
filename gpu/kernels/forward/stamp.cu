// When the stages of a traced forward run.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/wait.cuh"

namespace sluice::gpu {
namespace {

/// One thread.
__global__ void stamp_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer, std::uint32_t stage) {
  const ForwardState& state = *m.state;
  if (state.status != ForwardStatus::running) return;
  m.stamps_of(state.forward, layer)[stage] = {.forward = state.forward, .ns = forward::now_ns()};
}

}  // namespace

void launch_forward_stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, cudaStream_t stream) {
  stamp_kernel<<<1, 1, 0, stream>>>(memory, layer, static_cast<std::uint32_t>(stage));
  check(cudaGetLastError(), "launch the kernel that stamps a stage");
}

namespace detail {
void load_forward_stamp_kernel() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, stamp_kernel), "load the kernel that stamps a stage");
}
}  // namespace detail

}  // namespace sluice::gpu
