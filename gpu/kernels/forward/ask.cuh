#pragma once

#include <cuda/atomic>

#include "gpu/kernels/forward/ask.hpp"

namespace sluice::gpu::forward {

/// Asks the workers, if the layer has far rows or a choice for them. One thread, in a kernel behind `split`. Its fence is
/// the only one across the link, and covers what all thread blocks of that wrote.
__device__ __noinline__ inline void ask(const ForwardAsk& ask) {
  ForwardState& state = *ask.state;
  const std::uint32_t far_tokens = state.layer_far_tokens;
  const std::uint32_t choices = state.layer_choices;
  const std::uint64_t asked = state.asked + 1;
  const std::uint64_t forward = state.forward;
  if (far_tokens == 0 && choices == 0) return;
  state.layer_far_tokens = state.layer_choices = 0;
  if (ask.gate) ask.mailbox->gate.word = ForwardGate::closed(asked);
  auto& question = ask.mailbox->question;
  question.forward = forward;
  question.layer = ask.layer;
  question.drafts = ask.drafts;
  question.choices = choices;
  question.lists = ask.lists;
  __threadfence_system();
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>(question.asked)
      .store(asked, cuda::memory_order_release);
  state.asked = asked;
}

}  // namespace sluice::gpu::forward
