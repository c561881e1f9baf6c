// The end of a layer: the far part's answer is waited for, and near and far become one.

#include <cuda/atomic>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/decode.hpp"
#include "gpu/kernels/elements.cuh"

namespace sluice::gpu {
namespace detail {
void load_decode_append_kernels();
void load_decode_split_kernels();
}  // namespace detail

namespace {

constexpr std::uint32_t kThreads = 256;

__device__ std::uint64_t now_ns() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

/// The first thread block to get here looks at the answer, over the link; the others look at what it says, in device
/// memory: many that poll over the link stand in each other's way, and one that has not begun would keep them waiting.
/// Returns whether the forward goes on.
__device__ bool await_answer(const DecodeMemory& m) {
  DecodeState& state = *m.state;
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> released(state.released);
  cuda::atomic_ref<DecodeStatus, cuda::thread_scope_device> status(state.status);
  if (status.load(cuda::memory_order_acquire) != DecodeStatus::running) return false;
  const std::uint64_t asked = state.asked;
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> merging(state.merging);
  const std::uint32_t turn = merging.fetch_add(1, cuda::memory_order_relaxed);
  if (turn == gridDim.x - 1) merging.store(0, cuda::memory_order_relaxed);
  if (turn == 0 && released.load(cuda::memory_order_relaxed) != asked) {
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> answered(m.mailbox->answer.answered);
    const std::uint64_t begin = now_ns();
    while (answered.load(cuda::memory_order_acquire) < asked) {
      if (now_ns() - begin > m.answer_ns) {
        status.store(DecodeStatus::abandoned, cuda::memory_order_relaxed);
        break;
      }
      __nanosleep(20);
    }
    released.store(asked, cuda::memory_order_release);
  }
  while (released.load(cuda::memory_order_acquire) != asked) __nanosleep(20);
  return status.load(cuda::memory_order_relaxed) == DecodeStatus::running;
}

/// Pinned memory, which the CPU has just written.
__device__ float fresh(const float* from) { return __ldcv(from); }

__device__ void store_any(std::byte* row, std::uint32_t channel, DType dtype, float value) {
  switch (dtype) {
    case DType::f32: return detail::store_element<DType::f32>(row + 4 * channel, value);
    case DType::f16: return detail::store_element<DType::f16>(row + 2 * channel, value);
    case DType::bf16: return detail::store_element<DType::bf16>(row + 2 * channel, value);
  }
}

/// What near and far weigh in a head's output.
struct Weights {
  float near = 0.f;
  float far = 0.f;
  float lse = kEmptyLse;
};
__device__ Weights weigh(float near, float far) {
  const float top = fmaxf(near, far);
  if (top == kEmptyLse) return {};
  const float a = near == kEmptyLse ? 0.f : expf(near - top);
  const float b = far == kEmptyLse ? 0.f : expf(far - top);
  return {.near = a / (a + b), .far = b / (a + b), .lse = top + logf(a + b)};
}

/// Thread block (x, y): row x, KV head y.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ DecodeMemory m, const __grid_constant__ DecodeLayer layer) {
  __shared__ bool goes_on;
  const std::uint32_t group = m.shape.group();
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t row = blockIdx.x / m.shape.kv_heads;
  const std::uint32_t head = blockIdx.x % m.shape.kv_heads;
  const std::uint64_t first = std::uint64_t{row} * m.shape.q_heads + head * group;
  if (threadIdx.x == 0) goes_on = await_answer(m);
  __syncthreads();
  const bool padding = goes_on && m.rows[row].list == kNone;
  const bool has_near = goes_on && !padding && m.near_counts[blockIdx.x] != 0;
  const bool has_far = goes_on && !padding && m.far_counts[blockIdx.x] != 0;
  for (std::uint32_t i = threadIdx.x; i < group * head_dim; i += kThreads) {
    const std::uint64_t h = first + i / head_dim;
    const std::uint64_t at = first * head_dim + i;
    Weights weights = weigh(has_near ? m.near_lse[h] : kEmptyLse, has_far ? fresh(m.far_lse + h) : kEmptyLse);
    // Keys were attended and weigh nothing that is a number.
    if ((has_near && !(m.near_lse[h] > kEmptyLse)) || (has_far && !(fresh(m.far_lse + h) > kEmptyLse)))
      weights = {.lse = __int_as_float(0x7fc0'0000)};
    float value = 0.f;
    if (weights.near > 0.f) value += weights.near * m.near_out[at];
    if (weights.far > 0.f) value += weights.far * fresh(m.far_out + at);
    if (!goes_on || (!padding && weights.lse != weights.lse)) value = __int_as_float(0x7fc0'0000);
    store_any(layer.out.row(row, head * group + i / head_dim), i % head_dim, layer.out.dtype, value);
    if (layer.lse != nullptr && i % head_dim == 0) layer.lse[h] = goes_on ? weights.lse : __int_as_float(0x7fc0'0000);
  }
}

}  // namespace

void launch_decode_merge(const DecodeMemory& memory, const DecodeLayer& layer) {
  merge_kernel<<<memory.bucket.rows * memory.shape.kv_heads, kThreads, 0, static_cast<cudaStream_t>(layer.stream)>>>(
      memory, layer);
  check(cudaGetLastError(), "launch the merge kernel of a forward");
}

void load_decode_kernels() {
  detail::load_decode_append_kernels();
  detail::load_decode_split_kernels();
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, merge_kernel), "load the merge kernel of a forward");
}

}  // namespace sluice::gpu
