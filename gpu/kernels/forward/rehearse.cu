// Rehearsed queries of rows that choose, for policies of the CPU.

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/describe.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

constexpr std::uint32_t kThreads = 128;

/// Thread block (x, y): row x of those that choose, or team, KV head y.
__global__ void __launch_bounds__(kThreads)
    rehearse_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardLayer layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardRow& row = m.rows[blockIdx.x];
  if (row.list == kNone) return;
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * m.shape.kv_heads + blockIdx.y) * group * m.shape.head_dim;
  const std::uint32_t last = max(row.drafts, 1u) - 1;
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
    const auto [draft, head] = m.asker(blockIdx.y * group + i / m.shape.head_dim);
    const std::byte* const q = layer.rehearsed.row(row.at + min(draft, last), head);
    m.rehearsed_q[first + i] = load_any(q, i % m.shape.head_dim, layer.rehearsed.dtype);
  }
}

}  // namespace

void launch_forward_rehearsed(const ForwardMemory& memory, const ForwardLayer& layer) {
  OverlappingLaunch(dim3(memory.bucket.decode_rows, memory.shape.kv_heads), kThreads, 0,
                    static_cast<cudaStream_t>(layer.stream))
      .run(rehearse_kernel, "launch the kernel of rehearsed queries", memory, layer);
}

namespace detail {
void load_forward_rehearse_kernels() { load_kernel(rehearse_kernel, "load the kernel of rehearsed queries"); }
}  // namespace detail

}  // namespace sluice::gpu
