#pragma once

#include <cuda/atomic>

#include "sluice/forward_memory.hpp"

/// How kernels of a forward wait for the CPU.
namespace sluice::gpu::forward {

__device__ inline std::uint64_t now_ns() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

/// Of `blocks` thread blocks the first that does not find the answer there looks at it over the link, again and again; the
/// others look at what it says, in device memory: many that poll over the link stand in each other's way, and one that
/// has not begun would keep them waiting. One thread of each block. Returns how the forward is then.
__device__ inline ForwardStatus await_answer(const ForwardMemory& m, std::uint32_t blocks) {
  constexpr std::uint32_t kFewBlocks = 16;  // That may each look once.
  ForwardState& state = *m.state;
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> released(state.released);
  const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(state.status);
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> answered(m.mailbox->answer.answered);
  // On their way together: of these only `released` and `status` change while kernels merge, and only once.
  const ForwardStatus before = status.load(cuda::memory_order_relaxed);
  const std::uint64_t asked = state.asked;
  const std::uint64_t known = released.load(cuda::memory_order_relaxed);
  if (before != ForwardStatus::running || known == asked) return before;
  const std::uint64_t begin = now_ns();
  if (blocks <= kFewBlocks && answered.load(cuda::memory_order_acquire) >= asked) {
    if (blocks == 1) released.store(asked, cuda::memory_order_release);  // For a kernel that asks again.
    return status.load(cuda::memory_order_relaxed);
  }
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> polled(state.polled);
  if (polled.fetch_max(asked, cuda::memory_order_relaxed) < asked) {
    while (answered.load(cuda::memory_order_acquire) < asked) {
      if (now_ns() - begin > m.answer_ns) {
        status.store(ForwardStatus::abandoned, cuda::memory_order_relaxed);
        break;
      }
      __nanosleep(20);
    }
    const std::uint64_t end = now_ns();
    released.store(asked, cuda::memory_order_release);
    state.waited_ns += end - begin;
  }
  while (released.load(cuda::memory_order_acquire) != asked) __nanosleep(20);
  return status.load(cuda::memory_order_relaxed);
}

}  // namespace sluice::gpu::forward
