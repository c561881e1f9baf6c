#pragma once

namespace sluice::scheduler {

/// Asks for the cache line of `address`, which need not be valid; a hint.
inline void prefetch([[maybe_unused]] const void* address) noexcept {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#endif
}

}  // namespace sluice::scheduler
