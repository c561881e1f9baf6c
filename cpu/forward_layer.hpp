#pragma once

#include <atomic>

#include "cpu/kernels.hpp"
#include "sluice/backend.hpp"
#include "sluice/forward.hpp"

/// What the verbs of a forward do within a layer, now and here; see sluice::ForwardVerbs.
namespace sluice::cpu {

[[nodiscard]] inline bool runs(const ForwardMemory& memory) noexcept {
  return memory.state->status == ForwardStatus::running;
}

/// A word that workers or callers look at.
template <class T>
[[nodiscard]] std::atomic_ref<T> shared(T& word) noexcept {
  return std::atomic_ref<T>(word);
}

/// Near rows of freed blocks, and of the tokens that come, when a slip's lists have been taken.
void seat_tokens(const ForwardMemory& memory);
void append(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);
void prefill(Backend& prompts, const ForwardMemory& memory, const ForwardLayer& layer);
void score(const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer);
void choose(const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer);
void split(const ForwardMemory& memory, std::uint32_t layer);
void attend(const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer);
void promote(const ForwardMemory& memory, std::uint32_t layer);
void merge(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);

}  // namespace sluice::cpu
