#pragma once

#include <chrono>
#include <thread>

#include "sluice/run_clock.hpp"

namespace sluice::test {

/// Whether it comes true, on a machine however busy.
template <class Ready>
[[nodiscard]] bool comes(const Ready& ready) {
  const Deadline deadline = deadline_after(std::chrono::seconds(60));
  while (!ready()) {
    if (RunClock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace sluice::test
