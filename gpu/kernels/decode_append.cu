// How a decode forward begins and ends, and how its new keys and values come in.

#include <cuda/atomic>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/decode.hpp"
#include "gpu/kernels/quantize.cuh"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 128;
constexpr std::uint32_t kApplyThreads = 256;
constexpr std::uint32_t kMaxHeadDim = 128;

template <class T>
using SystemWord = cuda::atomic_ref<T, cuda::thread_scope_system>;

/// One thread block.
__global__ void __launch_bounds__(kApplyThreads) apply_kernel(const __grid_constant__ DecodeMemory m) {
  const DecodeSlip slip = *m.slip;
  for (std::uint32_t i = threadIdx.x; i < m.bucket.rows; i += kApplyThreads) m.rows[i] = m.slip_rows[i];
  for (std::uint32_t i = threadIdx.x; i < slip.list_changes; i += kApplyThreads) {
    const DecodeListChange change = m.slip_lists[i];
    m.lists[std::uint64_t{change.list} * m.max_pages + change.page] = change.block;
  }
  for (std::uint32_t i = threadIdx.x; i < slip.near_changes; i += kApplyThreads) {
    m.near_of[m.slip_near[i].block] = m.slip_near[i].near;
  }
  if (threadIdx.x == 0) m.state->planned = slip.forward;
}

__global__ void begin_kernel(const __grid_constant__ DecodeMemory m) {
  DecodeState& state = *m.state;
  state.released = state.asked;  // Of a forward that was abandoned.
  state.layer_far_tokens = state.arrived = state.merging = 0;
  state.status = state.planned > state.forward ? DecodeStatus::running : DecodeStatus::unplanned;
  state.forward = state.planned;
}

__global__ void cancel_kernel(const __grid_constant__ DecodeMemory m) {
  DecodeState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  state.forward = state.planned;
  state.status = outcome.status = DecodeStatus::cancelled;
  __threadfence_system();
  SystemWord<std::uint64_t>(outcome.forward).store(state.forward, cuda::memory_order_release);
  SystemWord<std::uint64_t>(outcome.cancelled).store(state.forward, cuda::memory_order_release);
}

__global__ void end_kernel(const __grid_constant__ DecodeMemory m) {
  DecodeState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  if (state.status == DecodeStatus::cancelled) return;  // A part of a forward, without its beginning.
  if (state.status == DecodeStatus::unplanned) {
    SystemWord<std::uint64_t>(outcome.unplanned).store(++state.unplanned, cuda::memory_order_release);
    return;
  }
  if (state.status == DecodeStatus::running) state.status = DecodeStatus::done;
  outcome.status = state.status;
  outcome.near_tokens = state.near_tokens;
  outcome.far_tokens = state.far_tokens;
  outcome.waited_ns = state.waited_ns;
  __threadfence_system();
  SystemWord<std::uint64_t>(outcome.forward).store(state.forward, cuda::memory_order_release);
}

__device__ float load_any(const std::byte* row, std::uint32_t channel, DType dtype) {
  switch (dtype) {
    case DType::f32: return detail::load_element<DType::f32>(row + 4 * channel);
    case DType::f16: return detail::load_element<DType::f16>(row + 2 * channel);
    case DType::bf16: return detail::load_element<DType::bf16>(row + 2 * channel);
  }
  return 0.f;
}

/// One row of K or V to its far page and, if there is one, its near page. `kept`, unless null, receives what a
/// reader of the page will see.
template <DType kType>
__device__ void put_row(const TensorView& in, std::uint32_t row, std::uint32_t head, std::byte* far, std::byte* near,
                        float* kept) {
  const std::byte* const from = in.row(row, head);
  for (std::uint32_t c = threadIdx.x; c < in.head_dim; c += kThreads) {
    const float value = load_any(from, c, in.dtype);
    detail::store_element<kType>(far + 2 * c, value);
    if (near != nullptr) detail::store_element<kType>(near + 2 * c, value);
    if (kept == nullptr) continue;
    alignas(4) std::byte rounded[4];  // In registers: the far page lies on the other side of the link.
    detail::store_element<kType>(rounded, value);
    kept[c] = detail::load_element<kType>(rounded);
  }
}

/// What the kernels behind this one read of a row and KV head.
__device__ void describe(const DecodeMemory& m, const DecodeScratch& scratch, const DecodeRow& row, std::uint32_t index,
                         std::uint32_t head, std::uint32_t plane) {
  const std::uint32_t group = m.shape.group();
  const std::uint32_t first = index * m.shape.q_heads + head * group;
  const bool there = row.list != kNone;
  float* const scores = m.scores + std::uint64_t{first} * m.bucket.max_tokens;
  scratch.score_tasks[index * m.shape.kv_heads + head] = {
      .q = m.q + std::uint64_t{first} * m.shape.head_dim,
      .copies = m.codes + m.far_page(plane, 0) * Int4Layout(m.layout).page_bytes(),
      .frames = m.lists + std::uint64_t{there ? row.list : 0} * m.max_pages,
      .tokens = there && row.picks != 0 ? row.tokens : 0,
      .out = scores};
  for (std::uint32_t h = 0; h < group; ++h) {
    scratch.top_k_rows[first + h] = {.values = scores + std::uint64_t{h} * row.tokens + row.sink_end,
                                     .out = m.picks + std::uint64_t{first + h} * m.bucket.max_picks,
                                     .count = there ? row.recent_begin - row.sink_end : 0,
                                     .k = there ? row.picks : 0};
  }
}

/// Thread block (x, y): row x, KV head y.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ DecodeMemory m, const __grid_constant__ DecodeScratch scratch,
                  const __grid_constant__ DecodeLayer layer) {
  __shared__ float key[kMaxHeadDim];
  if (m.state->status != DecodeStatus::running) return;
  const DecodeRow row = m.rows[blockIdx.x];
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t plane = m.plane(layer.layer, head);
  if (layer.q.tokens != 0) {
    if (threadIdx.x == 0) describe(m, scratch, row, blockIdx.x, head, plane);
    const std::uint32_t group = m.shape.group();
    const std::uint64_t first = std::uint64_t{blockIdx.x} * m.shape.q_heads + head * group;
    for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
      const std::uint32_t h = i / m.shape.head_dim;
      const float value =
          row.list == kNone ? 0.f
                            : load_any(layer.q.row(blockIdx.x, head * group + h), i % m.shape.head_dim, layer.q.dtype);
      m.q[first * m.shape.head_dim + i] = value;
      m.far_q[first * m.shape.head_dim + i] = value;
    }
  }
  if (row.list == kNone) return;
  const std::uint32_t position = row.tokens - 1;
  const std::uint32_t block = m.lists[std::uint64_t{row.list} * m.max_pages + position / m.layout.page_tokens];
  const std::uint32_t near_block = m.near_of[block];
  const std::uint64_t offset = position % m.layout.page_tokens * m.layout.row_bytes();
  std::byte* const far = m.far + m.far_page(plane, block) * m.layout.page_bytes() + offset;
  std::byte* const near =
      near_block == kNone ? nullptr : m.near + m.near_page(plane, near_block) * m.layout.page_bytes() + offset;
  const std::uint64_t values = m.layout.half_bytes();
  put_row<kType>(layer.k, blockIdx.x, head, far, near, key);
  put_row<kType>(layer.v, blockIdx.x, head, far + values, near == nullptr ? nullptr : near + values, nullptr);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const Int4Layout copy(m.layout);
  detail::quantize_row([](std::uint32_t channel) { return key[channel]; },
                       m.codes + m.far_page(plane, block) * copy.page_bytes(), position % m.layout.page_tokens, copy);
}

}  // namespace

void launch_decode_apply(const DecodeMemory& memory, cudaStream_t stream) {
  apply_kernel<<<1, kApplyThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that takes a plan");
}

void launch_decode_begin(const DecodeMemory& memory, cudaStream_t stream) {
  begin_kernel<<<1, 1, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that begins a forward");
}

void launch_decode_append(const DecodeMemory& memory, const DecodeScratch& scratch, const DecodeLayer& layer) {
  const dim3 grid(memory.bucket.rows, memory.shape.kv_heads);
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  if (memory.layout.dtype == DType::bf16) {
    append_kernel<DType::bf16><<<grid, kThreads, 0, stream>>>(memory, scratch, layer);
  } else {
    append_kernel<DType::f16><<<grid, kThreads, 0, stream>>>(memory, scratch, layer);
  }
  check(cudaGetLastError(), "launch the append kernel of a forward");
}

void launch_decode_cancel(const DecodeMemory& memory, cudaStream_t stream) {
  cancel_kernel<<<1, 1, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that takes a plan back");
}

void launch_decode_end(const DecodeMemory& memory, cudaStream_t stream) {
  end_kernel<<<1, 1, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that ends a forward");
}

namespace detail {
void load_decode_append_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, apply_kernel), "load the kernels of a forward");
  check(cudaFuncGetAttributes(&attributes, begin_kernel), "load the kernels of a forward");
  check(cudaFuncGetAttributes(&attributes, cancel_kernel), "load the kernels of a forward");
  check(cudaFuncGetAttributes(&attributes, end_kernel), "load the kernels of a forward");
  check(cudaFuncGetAttributes(&attributes, append_kernel<DType::bf16>), "load the kernels of a forward");
  check(cudaFuncGetAttributes(&attributes, append_kernel<DType::f16>), "load the kernels of a forward");
}
}  // namespace detail

}  // namespace sluice::gpu
