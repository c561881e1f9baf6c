#pragma once

#include <exception>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// As long as a hand-over usually takes on a machine without a GPU.
inline constexpr std::chrono::microseconds kSpin{50};

/// Polls `ready` until it is true or the deadline has passed; returns its last answer. Spins for `spin`, then naps: a
/// waiter must not keep a core from the thread that it waits for. It never yields, because on a busy machine sched_yield gave the core away for milliseconds.
template <class Ready>
[[nodiscard]] bool wait_until(Ready&& ready, Deadline deadline, std::chrono::microseconds spin = kSpin) {
  constexpr std::chrono::microseconds kNap{20};
  for (const Clock::time_point spin_end = Clock::now() + spin; Clock::now() < spin_end;) {
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (!ready()) {
    if (RunClock::now() >= deadline) return ready();
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

/// Work is still in flight: whatever else went wrong, this comes first.
[[nodiscard]] inline bool is_timeout(const std::exception& error) noexcept {
  const auto* const known = dynamic_cast<const Error*>(&error);
  return known != nullptr && known->code() == Errc::timeout;
}

}  // namespace sluice::runtime
