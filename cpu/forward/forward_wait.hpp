#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/forward/forward_layer.hpp"
#include "cpu/threads/spin.hpp"
#include "sluice/run_clock.hpp"

/// How verbs of a layer wait for threads that answer.
namespace sluice::cpu {

/// Waits for the CPU; what it is too late with it need not do. By the clock of a process that runs: one that was
/// suspended has not waited.
template <class Ready>
void await(const ForwardMemory& m, Deadline deadline, const Ready& ready) {
  constexpr std::chrono::microseconds kNap{20};
  if (ready()) return;
  const auto begin = Clock::now();
  while (!spin_until(ready)) {
    if (RunClock::now() >= deadline) {
      m.state->status = ForwardStatus::abandoned;
      break;
    }
    std::this_thread::sleep_for(kNap);  // Those who answer need the core more, should cores be scarce.
  }
  m.state->waited_ns +=
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
}

/// Of a layer that has waited since then.
inline Deadline answer_deadline(const ForwardMemory& m, RunClock::time_point since) {
  return since + std::chrono::nanoseconds(m.answer_ns);
}

}  // namespace sluice::cpu
