#pragma once

#include <atomic>
#include <cstdint>

#include "sluice/step/forward.hpp"

namespace sluice::runtime {

/// A word of the mailbox that the other side writes.
[[nodiscard]] inline std::uint64_t look(const std::uint64_t& word) noexcept {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

/// Adds to a count that others may look at meanwhile.
inline void count(std::uint64_t& word, std::uint64_t more = 1) noexcept {
  std::atomic_ref(word).fetch_add(more, std::memory_order_relaxed);
}

}  // namespace sluice::runtime
