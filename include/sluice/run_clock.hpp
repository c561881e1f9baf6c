#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

namespace sluice {

/// Time in which this process ran, for deadlines: the steady clock without the spans in which the process was suspended
/// (SIGSTOP, Ctrl-Z, `docker pause`, a virtual machine that was moved).
///
/// Nothing tells a process that it was suspended, so this clock goes only while a thread reads it: between two
/// reads, by any threads, at most kLongestGap pass. A thread that waits reads it between shorter naps. On a
/// machine so busy that naps take longer, deadlines come later. Thread safety: full. A read costs a lock: once per
/// nap, not in a loop that spins.
class RunClock {
 public:
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunClock>;
  static constexpr bool is_steady = true;

  static constexpr std::chrono::milliseconds kLongestGap{5};

  [[nodiscard]] static time_point now() noexcept {
    const std::lock_guard lock(mutex_);
    const auto steady = std::chrono::steady_clock::now();
    ran_ += std::min<duration>(steady - seen_, kLongestGap);
    seen_ = steady;
    return ran_;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::chrono::steady_clock::time_point seen_;  ///< of the last read; guarded by mutex_
  static inline time_point ran_;                              ///< guarded by mutex_
};

/// Every wait of the library takes one. There is no infinite wait.
using Deadline = RunClock::time_point;

template <class Rep, class Period>
[[nodiscard]] Deadline deadline_after(std::chrono::duration<Rep, Period> span) {
  return RunClock::now() + std::chrono::duration_cast<RunClock::duration>(span);
}

/// Waits on a condition variable until `ready()`, at most until the deadline; returns the last answer. In naps, see
/// RunClock.
template <class Condition, class Lock, class Ready>
[[nodiscard]] bool wait_on(Condition& changed, Lock& lock, Deadline deadline, const Ready& ready) {
  constexpr std::chrono::milliseconds kNap{2};
  while (!ready()) {
    const RunClock::duration left = deadline - RunClock::now();
    if (left <= RunClock::duration::zero()) return ready();
    changed.wait_for(lock, std::min<RunClock::duration>(left, kNap));
  }
  return true;
}

}  // namespace sluice
