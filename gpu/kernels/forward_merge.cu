// The end of a layer: the far part's answer is waited for, and near and far become one.

#include <cuda/atomic>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/forward.hpp"
#include "gpu/kernels/prefill_output.cuh"

namespace sluice::gpu {
namespace detail {
void load_forward_append_kernels();
void load_forward_apply_kernels();
void load_forward_audit_kernels();
void load_forward_near_kernels();
void load_forward_prefill_kernels();
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
/// Returns how the forward is then.
__device__ ForwardStatus await_answer(const ForwardMemory& m) {
  ForwardState& state = *m.state;
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> released(state.released);
  cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(state.status);
  const ForwardStatus before = status.load(cuda::memory_order_acquire);
  if (before != ForwardStatus::running) return before;
  const std::uint64_t asked = state.asked;
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> merging(state.merging);
  const std::uint32_t turn = merging.fetch_add(1, cuda::memory_order_relaxed);
  if (turn == gridDim.x - 1) merging.store(0, cuda::memory_order_relaxed);
  if (turn == 0 && released.load(cuda::memory_order_relaxed) != asked) {
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> answered(m.mailbox->answer.answered);
    const std::uint64_t begin = now_ns();
    while (answered.load(cuda::memory_order_acquire) < asked) {
      if (now_ns() - begin > m.answer_ns) {
        status.store(ForwardStatus::abandoned, cuda::memory_order_relaxed);
        break;
      }
      __nanosleep(20);
    }
    state.waited_ns += now_ns() - begin;
    released.store(asked, cuda::memory_order_release);
  }
  while (released.load(cuda::memory_order_acquire) != asked) __nanosleep(20);
  return status.load(cuda::memory_order_relaxed);
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
__device__ void put_out(const ForwardLayer& layer, std::byte* row, std::uint32_t channel, const Weights& weights,
                        const float* near, const float4& far) {
  const float fars[4] = {far.x, far.y, far.z, far.w};
  for (std::uint32_t c = 0; c < 4; ++c) {
    const float value = part(weights.near, near[c]) + part(weights.far, fars[c]);
    detail::store_number(row, layer.out.dtype, channel + c, weights.lse == weights.lse ? value : weights.lse);
  }
}

/// Thread block i: row i / kv_heads, KV head i % kv_heads.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 const __grid_constant__ ForwardLayer layer) {
  constexpr std::uint32_t kMaxGroup = 32;
  __shared__ Weights weights[kMaxGroup];
  __shared__ ForwardStatus status;
  const std::uint32_t group = m.shape.group();
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t row = blockIdx.x / m.shape.kv_heads;
  const std::uint32_t head = blockIdx.x % m.shape.kv_heads;
  const std::uint64_t first = std::uint64_t{row} * m.shape.q_heads + head * group;
  if (threadIdx.x == 0) status = await_answer(m);
  __syncthreads();
  const ForwardRow& chooses = m.rows[row];
  const bool goes_on = status == ForwardStatus::running;
  // Of a forward that did not begin the rows are not to be believed, and `append` has seen to its outputs.
  if ((!goes_on && status != ForwardStatus::abandoned) || chooses.list == kNone) return;
  const bool has_near = goes_on && m.near_counts[blockIdx.x] != 0;
  // Whether there is anything in a list that the CPU has added to, the answer says.
  const bool asks = chooses.in(layer.layer).asks != 0;
  const bool has_far = goes_on && (asks || m.far_listed[blockIdx.x] != 0);
  // What the CPU has just written is read once, in wide words, and all of it at once: each way over the link is long.
  const auto far_out = [&](std::uint32_t at) {
    if (!has_far || at >= group * head_dim) return float4{};
    return __ldcv(reinterpret_cast<const float4*>(m.far_out + first * head_dim + at));
  };
  float4 far = far_out(4 * threadIdx.x);
  if (threadIdx.x < group) {
    const std::uint64_t h = first + threadIdx.x;
    const float far_lse = has_far ? __ldcv(m.far_lse + h) : kEmptyLse;
    const Weights mine =
        weigh(has_near, has_near ? m.near_lse[h] : kEmptyLse, has_far && !(asks && far_lse == kEmptyLse), far_lse);
    weights[threadIdx.x] = goes_on ? mine : Weights{.lse = __int_as_float(0x7fc0'0000)};
    if (layer.lse != nullptr)
      layer.lse[std::uint64_t{chooses.at} * m.shape.q_heads + head * group + threadIdx.x] = weights[threadIdx.x].lse;
  }
  __syncthreads();
  for (std::uint32_t at = 4 * threadIdx.x; at < group * head_dim; at += 4 * kThreads) {
    put_out(layer, layer.out.row(chooses.at, head * group + at / head_dim), at % head_dim, weights[at / head_dim],
            m.near_out + first * head_dim + at, far);
    far = far_out(at + 4 * kThreads);
  }
}

}  // namespace

void launch_forward_merge(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  merge_kernel<<<memory.bucket.decode_rows * memory.shape.kv_heads, kThreads, 0,
                 static_cast<cudaStream_t>(layer.stream)>>>(memory, scratch, layer);
  check(cudaGetLastError(), "launch the merge kernel of a forward");
}

void load_forward_kernels() {
  detail::load_forward_append_kernels();
  detail::load_forward_apply_kernels();
  detail::load_forward_audit_kernels();
  detail::load_forward_near_kernels();
  detail::load_forward_prefill_kernels();
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, merge_kernel), "load the merge kernel of a forward");
}

}  // namespace sluice::gpu
