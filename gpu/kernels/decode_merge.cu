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
    state.waited_ns += now_ns() - begin;
    released.store(asked, cuda::memory_order_release);
  }
  while (released.load(cuda::memory_order_acquire) != asked) __nanosleep(20);
  return status.load(cuda::memory_order_relaxed) == DecodeStatus::running;
}

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
__device__ Weights weigh(bool has_near, float near, bool has_far, float far) {
  // Keys were attended and weigh nothing that is a number.
  if ((has_near && !(near > kEmptyLse)) || (has_far && !(far > kEmptyLse))) return {.lse = __int_as_float(0x7fc0'0000)};
  const float top = fmaxf(near, far);
  if (top == kEmptyLse) return {};
  const float a = has_near ? expf(near - top) : 0.f;
  const float b = has_far ? expf(far - top) : 0.f;
  return {.near = a / (a + b), .far = b / (a + b), .lse = top + logf(a + b)};
}

__device__ float part(float weight, float value) { return weight > 0.f ? weight * value : 0.f; }

/// Four channels of a head. `far` was read already.
__device__ void put_out(const DecodeLayer& layer, std::byte* row, std::uint32_t channel, const Weights& weights,
                        const float* near, const float4& far) {
  const float fars[4] = {far.x, far.y, far.z, far.w};
  for (std::uint32_t c = 0; c < 4; ++c) {
    const float value = part(weights.near, near[c]) + part(weights.far, fars[c]);
    store_any(row, channel + c, layer.out.dtype, weights.lse == weights.lse ? value : weights.lse);
  }
}

/// Thread block i: row i / kv_heads, KV head i % kv_heads.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ DecodeMemory m, const __grid_constant__ DecodeScratch scratch,
                 const __grid_constant__ DecodeLayer layer) {
  constexpr std::uint32_t kMaxGroup = 32;
  __shared__ Weights weights[kMaxGroup];
  __shared__ bool goes_on;
  const std::uint32_t group = m.shape.group();
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t row = blockIdx.x / m.shape.kv_heads;
  const std::uint32_t head = blockIdx.x % m.shape.kv_heads;
  const std::uint64_t first = std::uint64_t{row} * m.shape.q_heads + head * group;
  if (threadIdx.x == 0) goes_on = await_answer(m);
  __syncthreads();
  const bool attends = goes_on && m.rows[row].list != kNone;
  const bool has_near = attends && m.near_counts[blockIdx.x] != 0;
  const bool has_far = attends && scratch.far_counts[blockIdx.x] != 0;
  // What the CPU has just written is read once, in wide words, and all of it at once: each way over the link is long.
  const auto far_out = [&](std::uint32_t at) {
    if (!has_far || at >= group * head_dim) return float4{};
    return __ldcv(reinterpret_cast<const float4*>(m.far_out + first * head_dim + at));
  };
  float4 far = far_out(4 * threadIdx.x);
  if (threadIdx.x < group) {
    const std::uint64_t h = first + threadIdx.x;
    const Weights mine =
        weigh(has_near, has_near ? m.near_lse[h] : kEmptyLse, has_far, has_far ? __ldcv(m.far_lse + h) : kEmptyLse);
    weights[threadIdx.x] = goes_on ? mine : Weights{.lse = __int_as_float(0x7fc0'0000)};
    if (layer.lse != nullptr) layer.lse[h] = weights[threadIdx.x].lse;
  }
  __syncthreads();
  for (std::uint32_t at = 4 * threadIdx.x; at < group * head_dim; at += 4 * kThreads) {
    put_out(layer, layer.out.row(row, head * group + at / head_dim), at % head_dim, weights[at / head_dim],
            m.near_out + first * head_dim + at, far);
    far = far_out(at + 4 * kThreads);
  }
}

}  // namespace

void launch_decode_merge(const DecodeMemory& memory, const DecodeScratch& scratch, const DecodeLayer& layer) {
  merge_kernel<<<memory.bucket.rows * memory.shape.kv_heads, kThreads, 0, static_cast<cudaStream_t>(layer.stream)>>>(
      memory, scratch, layer);
  check(cudaGetLastError(), "launch the merge kernel of a forward");
}

void load_decode_kernels() {
  detail::load_decode_append_kernels();
  detail::load_decode_split_kernels();
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, merge_kernel), "load the merge kernel of a forward");
}

}  // namespace sluice::gpu
