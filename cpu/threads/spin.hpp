#pragma once

#include <chrono>

#include "sluice/units.hpp"

namespace sluice::cpu {

/// How long a thread looks before it sleeps: as long as a futex wake-up takes (5 to 50 us), so that a
/// hand-over about to come is not slept through and one that is not costs the workers no more than that.
inline constexpr std::chrono::microseconds kSpin{25};

/// Leaves the core's shared units to its other hardware thread. No yield: on a busy machine that hands the
/// core to others for milliseconds, while a thread that sleeps is woken ahead of them.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// True as soon as `ready()` is; false if it is not within kSpin.
template <class Ready>
[[nodiscard]] bool spin_until(Ready&& ready) {
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    if (ready()) return true;
    relax();
  } while (Clock::now() < end);
  return ready();
}

}  // namespace sluice::cpu
