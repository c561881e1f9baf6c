#pragma once

#include <thread>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// Polls `ready` until it is true or the deadline has passed; returns its last answer. Spins for a few
/// microseconds, because most hand-overs take that long, then yields, then sleeps: a waiter must not
/// keep a core from the thread that it waits for.
template <class Ready>
[[nodiscard]] bool wait_until(Ready&& ready, Deadline deadline) {
  constexpr int kSpins = 2'000;
  constexpr int kYields = 2'000;
  constexpr std::chrono::microseconds kNap{20};
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int i = 0; Clock::now() < deadline; ++i) {
    if (ready()) return true;
    if (i < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return ready();
}

}  // namespace sluice::runtime
