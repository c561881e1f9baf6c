// What a layer of an audited forward attended, for the host to hold against exact attention.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;

/// Thread block i: row i / kv_heads of those that choose, KV head i % kv_heads.
__global__ void __launch_bounds__(kThreads)
    audit_kernel(const __grid_constant__ ForwardMemory m, const std::uint32_t* __restrict__ far_rows,
                 const __grid_constant__ ForwardLayer layer) {
  const std::uint32_t index = blockIdx.x;
  const ForwardRow& row = m.rows[index / m.shape.kv_heads];
  if (m.state->status != ForwardStatus::running || row.list == kNone) return;
  const std::uint32_t kv_head = index % m.shape.kv_heads;
  const std::uint32_t plane = m.plane(layer.layer, kv_head);
  const std::uint32_t near = m.near_counts[index];
  const std::uint32_t far = m.far_listed[index];
  const std::uint64_t list = m.audit_list(layer.layer, index);
  const std::uint64_t from = std::uint64_t{index} * m.list_room();
  std::uint32_t* const rows = m.audit_rows + list * m.list_room();
  for (std::uint32_t i = threadIdx.x; i < near; i += kThreads)
    rows[i] = m.far_row_of_near(plane, m.near_lists[from + i]);
  for (std::uint32_t i = threadIdx.x; i < far; i += kThreads) rows[near + i] = far_rows[from + i];
  if (threadIdx.x == 0) m.audit_counts[list] = near + far;
  const std::uint32_t group = m.shape.group();
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
    const auto [draft, head] = m.asker(kv_head * group + i / m.shape.head_dim);
    if (draft >= max(row.drafts, 1u)) continue;
    const std::uint32_t at = row.at + draft;
    const std::uint64_t to = list * group * m.shape.head_dim + i;
    m.audit_q[to] = m.q[std::uint64_t{index} * group * m.shape.head_dim + i];
    m.audit_out[to] = detail::load_number(layer.out.row(at, head), layer.out.dtype, i % m.shape.head_dim);
    if (i % m.shape.head_dim == 0)
      m.audit_lse[list * group + i / m.shape.head_dim] = layer.lse[std::uint64_t{at} * layer.out.heads + head];
  }
}

}  // namespace

void launch_forward_audit(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  audit_kernel<<<memory.bucket.decode_rows * memory.shape.kv_heads, kThreads, 0,
                 static_cast<cudaStream_t>(layer.stream)>>>(memory, scratch.far_rows, layer);
  check(cudaGetLastError(), "launch the audit kernel of a forward");
}

namespace detail {
void load_forward_audit_kernels() {
  load_kernel(audit_kernel, "load the audit kernel of a forward");
}
}  // namespace detail

}  // namespace sluice::gpu
