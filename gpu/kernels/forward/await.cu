// Far rows that the CPU chooses and the device attends: what to attend is known when a list is chosen for.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/wait.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 128;

/// One thread block, for lists [first, last).
__global__ void __launch_bounds__(kThreads)
    await_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 std::uint32_t layer, std::uint32_t first, std::uint32_t last) {
  // Of a forward that does not run `split` has described nothing. Nobody but this kernel changes that meanwhile.
  const bool runs = m.state->status == ForwardStatus::running;
  const std::uint64_t begin = forward::now_ns();
  const std::uint64_t since = first == 0 ? begin : m.state->fetching_ns;  // A layer waits no longer for being in turns.
  __syncthreads();
  if (!runs) return;
  if (first == 0 && threadIdx.x == 0) m.state->fetching_ns = begin;
  bool asked = false;
  for (std::uint32_t i = first + threadIdx.x; i < last; i += kThreads) {
    const ForwardRow row = m.rows[i / m.shape.kv_heads].in(layer, m.window);
    if (row.list == kNone || row.asks == 0) continue;
    asked = true;
    // Jobs of a list that is not chosen for stay as `split` has left them, without rows.
    const forward::Came came =
        forward::await_word(m, m.chosen[i].asked, m.state->asked, since, forward::nap_of(last - first));
    if (came == forward::Came::never) break;
    const std::uint32_t count = __ldcv(&m.chosen[i].count);
    const std::uint32_t members = __ldcv(&m.chosen[i].members);
    m.fetch_heads[i] = __ldcv(&m.chosen[i].heads);
    if (count != 0)  // Of those that it listed the device has told.
      atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->fetched_tokens),
                static_cast<unsigned long long>(count - m.far_listed[i]));
    for (std::uint32_t b = 0; b < scratch.head_blocks; ++b) {
      AttendJob& job = scratch.jobs[scratch.job_count + i * scratch.head_blocks + b];
      job.lists = m.chosen_rows + i * m.chosen_room();
      job.tokens = count;
      job.has_members = members;
    }
  }
  if (__syncthreads_or(asked) && threadIdx.x == 0) m.state->waited_ns += forward::now_ns() - begin;
}

}  // namespace

void launch_forward_await(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                          std::uint32_t first, std::uint32_t last) {
  await_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(layer.stream)>>>(memory, scratch, layer.layer, first, last);
  check(cudaGetLastError(), "launch the kernel that waits for what the CPU chooses");
}

namespace detail {
void load_forward_await_kernel() {
  load_kernel(await_kernel, "load the kernel that waits for what the CPU chooses");
}
}  // namespace detail

}  // namespace sluice::gpu
