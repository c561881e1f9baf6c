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

/// How it stands with the answer as a thread block begins, looked at all at once.
struct AnswerLook {
  ForwardStatus status = ForwardStatus::running;
  std::uint64_t asked = 0;
  std::uint64_t released = 0;
  std::uint64_t merged = 0;
  std::uint64_t answered = 0;  ///< as the mailbox has it, if that was looked at
  std::uint64_t since_ns = 0;  ///< likewise, when that was

  /// Of these all but `asked` may change while kernels merge, and only once.
  __device__ void look(ForwardState& state) {
    using Word = cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>;
    using Status = cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device>;
    status = Status(state.status).load(cuda::memory_order_relaxed);
    asked = state.asked;
    released = Word(state.released).load(cuda::memory_order_relaxed);
    merged = Word(state.merged).load(cuda::memory_order_relaxed);
  }
  __device__ void look_over_link(const ForwardMemory& m) {
    since_ns = now_ns();
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> word(m.mailbox->answer.answered);
    answered = word.load(cuda::memory_order_relaxed);
  }
  /// Whether the layer has asked, and nobody has seen the answer.
  [[nodiscard]] __device__ bool awaits() const { return merged != asked; }
  /// Whether nothing is left to wait for. Then nobody abandons the forward in this layer who looks from now on.
  [[nodiscard]] __device__ bool there() const {
    return status == ForwardStatus::running && (!awaits() || answered >= asked);
  }
};

/// The answer to question `asked` is there. For kernels behind this one, of layers that ask nothing: who wants to know
/// in this one whether a far part is there looks at that itself.
__device__ inline void see(ForwardState& state, std::uint64_t asked) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> merged(state.merged);
  merged.store(asked, cuda::memory_order_relaxed);
}

/// Nobody waits for it.
__device__ inline void add(std::uint64_t& sum, std::uint64_t more) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&sum), "l"(more));
}

/// The first thread block to get here looks at the answer, over the link; the others look at what it says, in device
/// memory: many that poll over the link stand in each other's way, and one that has not begun would keep them waiting.
/// One thread of each block, some time after its `look`. Returns how the forward is then; if it runs, what the CPU has
/// written is there.
__device__ inline ForwardStatus await_answer(const ForwardMemory& m, const AnswerLook& look) {
  if (look.status != ForwardStatus::running) return look.status;
  ForwardState& state = *m.state;
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> released(state.released);
  const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(state.status);
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> polled(state.polled);
  if (look.released != look.asked && polled.exchange(look.asked, cuda::memory_order_relaxed) != look.asked) {
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> answered(m.mailbox->answer.answered);
    const std::uint64_t begin = look.since_ns != 0 ? look.since_ns : now_ns();
    // A layer waits no longer for having waited in `fetch`.
    const std::uint64_t since = m.fetches_chosen ? state.fetching_ns : begin;
    bool late = false;
    while (answered.load(cuda::memory_order_acquire) < look.asked) {
      late = now_ns() - since > m.answer_ns;
      if (late) break;
      __nanosleep(20);
    }
    const std::uint64_t end = now_ns();
    if (late) {
      status.store(ForwardStatus::abandoned, cuda::memory_order_relaxed);
    } else {
      see(state, look.asked);
    }
    released.store(look.asked, cuda::memory_order_release);
    add(state.waited_ns, end - begin);
  }
  while (released.load(cuda::memory_order_acquire) != look.asked) __nanosleep(20);
  return status.load(cuda::memory_order_relaxed);
}

/// What a thread block notes that finds all it wants at once; `far`: the far part of a list among it. One thread of it.
__device__ inline void note_at_once(const ForwardMemory& m, const AnswerLook& look, bool far) {
  ForwardState& state = *m.state;
  if (far) add(state.at_once, 1);
  if (blockIdx.x != 0 || !look.awaits()) return;
  add(state.waited_ns, now_ns() - look.since_ns);
  see(state, look.asked);
}

}  // namespace sluice::gpu::forward
