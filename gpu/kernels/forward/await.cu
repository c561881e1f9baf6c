// Far rows that the CPU chooses and the device attends: what to attend is known when the answer is there.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/wait.cuh"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 128;

/// One thread block.
__global__ void __launch_bounds__(kThreads)
    await_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 std::uint32_t layer) {
  __shared__ ForwardStatus status;
  if (threadIdx.x == 0) status = forward::await_answer(m, gridDim.x);
  __syncthreads();
  // Of a forward that does not run `split` has described nothing.
  if (status != ForwardStatus::running) return;
  for (std::uint32_t i = threadIdx.x; i < m.bucket.decode_rows * m.shape.kv_heads; i += kThreads) {
    const ForwardRow row = m.rows[i / m.shape.kv_heads].in(layer, m.window);
    if (row.list == kNone || row.asks == 0) continue;
    const std::uint32_t count = __ldcv(&m.chosen[i].count);
    const std::uint32_t members = __ldcv(&m.chosen[i].members);
    m.fetch_heads[i] = __ldcv(&m.chosen[i].heads);
    for (std::uint32_t b = 0; b < scratch.head_blocks; ++b) {
      AttendJob& job = scratch.jobs[scratch.job_count + i * scratch.head_blocks + b];
      job.lists = m.chosen_rows + i * m.chosen_room();
      job.tokens = count;
      job.has_members = members;
    }
  }
}

}  // namespace

void launch_forward_await(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  await_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(layer.stream)>>>(memory, scratch, layer.layer);
  check(cudaGetLastError(), "launch the kernel that waits for what the CPU chooses");
}

namespace detail {
void load_forward_await_kernel() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, await_kernel), "load the kernel that waits for what the CPU chooses");
}
}  // namespace detail

}  // namespace sluice::gpu
