#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "sluice/run_clock.hpp"
#include "tests/runtime/comes.hpp"
#include "tests/support/catch.hpp"

namespace sluice::test {

/// Holds threads up that come to answer or to work for a job, as many as it is told to, until it is opened. The thread
/// that made it is not held up, but lets others come first.
struct Gate {
  std::atomic<int> wanted{0};  ///< threads that it is still to hold up
  std::atomic<int> held{0};
  std::atomic<bool> open{false};
  std::atomic<bool> helped{false};  ///< the caller has begun a piece
  const std::thread::id caller = std::this_thread::get_id();

  /// For EngineOptions::before_answer.
  void pass() {
    if (std::this_thread::get_id() == caller) {
      const Deadline deadline = deadline_after(std::chrono::seconds(20));
      while (wanted > 0 && RunClock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // Others come first.
      helped = true;
      return;
    }
    if (wanted <= 0 || wanted.fetch_sub(1) <= 0) return;
    ++held;
    while (!open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --held;
  }
  /// When as many are held: none that comes later is.
  void await(int threads) {
    REQUIRE(comes([&] { return held >= threads; }));
    REQUIRE(held == threads);
    wanted = 0;
  }
};

}  // namespace sluice::test
