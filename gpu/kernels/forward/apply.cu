// How a forward is planned, begins and ends.

#include <cuda/atomic>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kCopyBlocks = 64;

template <class T>
using SystemWord = cuda::atomic_ref<T, cuda::thread_scope_system>;

/// One thread.
__device__ void publish(const ForwardMemory& m, std::uint64_t forward, ForwardStatus status) {
  auto& outcome = m.mailbox->outcome;
  m.state->told = forward;
  outcome.status[forward % kMostForwards] = status;
  // By this alone workers know that queries which came back for histories, and new keys, are there.
  SystemWord<std::uint64_t>(outcome.good).store(m.state->good, cuda::memory_order_release);
  SystemWord<std::uint64_t>(outcome.forward).store(forward, cuda::memory_order_release);
}

/// One thread block.
__global__ void __launch_bounds__(kThreads) apply_kernel(const __grid_constant__ ForwardMemory m) {
  const ForwardSlip slip = *m.slip;
  for (std::uint32_t i = threadIdx.x; i < slip.bucket.rows(); i += kThreads) m.tokens[i] = m.slip_tokens[i];
  for (std::uint32_t i = threadIdx.x; i < slip.bucket.decode_rows; i += kThreads) m.rows[i] = m.slip_rows[i];
  for (std::uint32_t i = threadIdx.x; i < slip.bucket.prefills; i += kThreads) m.chunks[i] = m.slip_chunks[i];
  for (std::uint32_t c = 0; c < slip.list_changes; ++c) {
    const ForwardListChange change = m.slip_lists[c];
    std::uint32_t* const list = m.lists + std::uint64_t{change.list} * m.max_pages + change.page;
    for (std::uint32_t i = threadIdx.x; i < change.count; i += kThreads) list[i] = m.slip_blocks[change.from + i];
  }
  if (threadIdx.x != 0) return;
  ForwardState& state = *m.state;
  if (state.planned > state.told) {  // It has not begun, or not come to its end: nor does one that failed before.
    state.forward = state.planned;
    state.status = ForwardStatus::skipped;
    publish(m, state.planned, state.status);
  }
  state.after = slip.after;
  state.bucket = slip.bucket;
  state.planned = slip.forward;
  if (state.bucket.whole && state.planned - state.kept >= kNearTurn) state.kept = state.planned;
}

/// Thread blocks share the planes of every copy.
__global__ void __launch_bounds__(kThreads) copy_codes_kernel(const __grid_constant__ ForwardMemory m) {
  const std::uint64_t words = m.code_layout().page_bytes() / sizeof(std::uint32_t);
  auto* const codes = reinterpret_cast<std::uint32_t*>(m.codes);
  for (std::uint32_t c = 0; c < m.slip->block_copies; ++c) {
    const ForwardBlockCopy copy = m.slip_copies[c];
    for (std::uint32_t plane = blockIdx.x; plane < m.planes(); plane += gridDim.x) {
      for (std::uint64_t i = threadIdx.x; i < words; i += kThreads)
        codes[m.far_page(plane, copy.to) * words + i] = codes[m.far_page(plane, copy.from) * words + i];
    }
  }
}

/// `candidates`: of a layer's choices, `heads` counters that `merge` leaves at 0, and a forward that ended early may
/// not have.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t* candidates, std::uint32_t heads) {
  for (std::uint32_t h = threadIdx.x; h < heads; h += kThreads) candidates[h] = 0;
  if (threadIdx.x != 0) return;
  ForwardState& state = *m.state;
  state.released = state.asked;  // Of a forward that was abandoned.
  state.layer_far_tokens = state.layer_choices = state.arrived = 0;
  const bool planned = state.planned > state.forward;
  if (!planned && state.planned > state.told) publish(m, state.planned, ForwardStatus::skipped);
  state.forward = state.planned;
  state.status = !planned                      ? ForwardStatus::unplanned
                 : state.after != state.good   ? ForwardStatus::orphaned
                 : !(state.bucket == m.bucket) ? ForwardStatus::mismatched
                                               : ForwardStatus::running;
}

__global__ void cancel_kernel(const __grid_constant__ ForwardMemory m, std::uint64_t before) {
  ForwardState& state = *m.state;
  state.forward = state.planned;
  state.good = min(state.good, before);  // Not of one that failed.
  state.status = ForwardStatus::cancelled;
  publish(m, state.forward, state.status);
  SystemWord<std::uint64_t>(m.mailbox->outcome.cancelled).store(state.forward, cuda::memory_order_release);
}

__global__ void end_kernel(const __grid_constant__ ForwardMemory m) {
  ForwardState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  if (state.status == ForwardStatus::cancelled) return;  // A part of a forward, without its beginning.
  if (state.status == ForwardStatus::unplanned) {
    SystemWord<std::uint64_t>(outcome.unplanned).store(++state.unplanned, cuda::memory_order_release);
    return;
  }
  if (state.status == ForwardStatus::running) {
    state.status = ForwardStatus::done;
    state.good = state.forward;
  }
  outcome.near_tokens = state.near_tokens;
  outcome.far_tokens = state.far_tokens;
  outcome.fetched_tokens = state.fetched_tokens;
  outcome.drawn_heads = state.drawn_heads;
  outcome.error_bars = state.error_bars;
  outcome.wide_bars = state.wide_bars;
  outcome.waited_ns = state.waited_ns;
  outcome.promoted = state.promoted;
  outcome.near_rows = state.near_rows;
  outcome.missed = state.missed;
  outcome.awaited = state.awaited;
  publish(m, state.forward, state.status);
}

}  // namespace

void launch_forward_apply(const ForwardMemory& memory, cudaStream_t stream) {
  const bool copies = memory.slip->block_copies != 0 && memory.has_codes();
  if (copies) copy_codes_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(memory);
  apply_kernel<<<1, kThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that takes a plan");
  launch_forward_key_means(memory, stream);  // By lists and codes as they are now.
  if (memory.near_pages != 0) launch_forward_acquire(memory, stream);
}

void launch_forward_begin(const ForwardMemory& memory, const ForwardScratch& scratch, cudaStream_t stream) {
  std::uint32_t* const candidates = scratch.foresight.counts;
  const std::uint32_t heads = candidates == nullptr ? 0 : memory.largest.decode_rows * memory.shape.q_heads;
  begin_kernel<<<1, kThreads, 0, stream>>>(memory, candidates, heads);
  check(cudaGetLastError(), "launch the kernel that begins a forward");
}

void launch_forward_cancel(const ForwardMemory& memory, std::uint64_t before, cudaStream_t stream) {
  cancel_kernel<<<1, 1, 0, stream>>>(memory, before);
  check(cudaGetLastError(), "launch the kernel that takes a plan back");
}

void launch_forward_end(const ForwardMemory& memory, cudaStream_t stream) {
  end_kernel<<<1, 1, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that ends a forward");
}

namespace detail {
void load_forward_apply_kernels() {
  const auto load = [](auto*... kernels) { (load_kernel(kernels, "load the kernels of a forward"), ...); };
  load(apply_kernel, copy_codes_kernel, begin_kernel, cancel_kernel, end_kernel);
}
}  // namespace detail

}  // namespace sluice::gpu
