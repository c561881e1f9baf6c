#pragma once

#include <cuda/atomic>

#include "gpu/kernels/clock.cuh"
#include "sluice/step/forward_memory.hpp"

/// How kernels of a forward wait for the CPU.
namespace sluice::gpu::forward {

using detail::now_ns;

enum class Came { at_once, late, never };
/// Waits for a word of pinned memory, which threads of the host write behind what it speaks for, to be `wanted`: over
/// the link, in naps. If it is not for as long as an answer may take, from `since` on, the forward is abandoned. One
/// thread.
__device__ inline Came await_word(const ForwardMemory& m, std::uint64_t& word, std::uint64_t wanted,
                                  std::uint64_t since, std::uint32_t nap_ns) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> of_host(word);
  Came came = Came::at_once;
  while (of_host.load(cuda::memory_order_acquire) != wanted) {
    came = Came::late;
    if (now_ns() - since > m.answer_ns) {
      const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(m.state->status);
      status.store(ForwardStatus::abandoned, cuda::memory_order_relaxed);
      return Came::never;
    }
    __nanosleep(nap_ns);
  }
  return came;
}
/// Of as many threads that wait so: together they look no oftener than one of a few would.
__device__ inline std::uint32_t nap_of(std::uint32_t threads) { return min(50 * threads, 4000u); }

/// Waits for the answer to question `asked`, over the link. One thread. Returns whether it has come.
__device__ inline bool await_answered(const ForwardMemory& m, std::uint64_t asked, std::uint64_t begin) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> answered(m.mailbox->answer.answered);
  // A layer waits no longer for having waited in `fetch`.
  const std::uint64_t since = m.fetches_chosen ? m.state->fetching_ns : begin;
  while (answered.load(cuda::memory_order_acquire) < asked) {
    if (now_ns() - since > m.answer_ns) {
      const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(m.state->status);
      status.store(ForwardStatus::abandoned, cuda::memory_order_relaxed);
      return false;
    }
    __nanosleep(20);
  }
  return true;
}

/// Thread blocks at most that each look at the answer over the link: more stand in each other's way.
inline constexpr std::uint32_t kMostPollers = 16;

/// Each of `blocks` thread blocks looks at the answer; or of many the first to get here, and the others look at what it
/// says, in device memory, as one that has not begun would keep them waiting. One thread of each block. Returns how the
/// forward is then; of one that is abandoned some blocks may have had their answer.
__device__ inline ForwardStatus await_answer(const ForwardMemory& m, std::uint32_t blocks) {
  ForwardState& state = *m.state;
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> released(state.released);
  const cuda::atomic_ref<ForwardStatus, cuda::thread_scope_device> status(state.status);
  // On their way together: of these only `released` and `status` change while kernels merge, and only once.
  const ForwardStatus before = status.load(cuda::memory_order_relaxed);
  const std::uint64_t asked = state.asked;
  const std::uint64_t known = released.load(cuda::memory_order_acquire);
  if (before != ForwardStatus::running || known == asked) return before;
  bool looks = blocks <= kMostPollers;
  bool tells = blockIdx.x == 0;
  if (!looks) {
    // Questions are counted through, so that nothing is left to be reset by blocks that have not even begun.
    cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> claimed(state.claimed);
    looks = tells = claimed.fetch_max(asked, cuda::memory_order_relaxed) < asked;
  }
  if (looks) {
    const std::uint64_t begin = now_ns();
    const bool came = await_answered(m, asked, begin);
    if (tells) state.waited_ns += now_ns() - begin;
    if (!came) return ForwardStatus::abandoned;
    if (tells) released.store(asked, cuda::memory_order_release);
    return status.load(cuda::memory_order_relaxed);
  }
  while (released.load(cuda::memory_order_acquire) != asked) {
    const ForwardStatus now = status.load(cuda::memory_order_relaxed);
    if (now != ForwardStatus::running) return now;
    __nanosleep(20);
  }
  return ForwardStatus::running;
}

}  // namespace sluice::gpu::forward
