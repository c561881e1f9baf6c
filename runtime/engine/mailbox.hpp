#pragma once

#include <atomic>
#include <cstdint>

#include "sluice/forward.hpp"

namespace sluice::runtime {

/// A word of the mailbox that the other side writes.
[[nodiscard]] inline std::uint64_t look(const std::uint64_t& word) noexcept {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace sluice::runtime
