#pragma once

#include <chrono>
#include <thread>

#include "sluice/run_clock.hpp"

namespace sluice::test {

/// Keeps the calling thread for a span of the clock that the library's deadlines go by. What is held up past a deadline
/// is so on a busy machine, too, where that clock goes slower than others; what is to be in time is in time.
inline void pause_for(std::chrono::milliseconds span) {
  for (const Deadline end = deadline_after(span); RunClock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace sluice::test
