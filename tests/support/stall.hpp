#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "sluice/run_clock.hpp"

namespace sluice::test {

/// Holds one worker up before one of its bodies until it is told to let go. Callers of parallel_for wait for the
/// workers before they begin bodies of their own, so that the workers get any.
class Stall {
 public:
  /// Holds the worker that is the (`skip` + 1)-th to begin a body.
  explicit Stall(std::uint32_t skip = 0) : gate_(std::make_shared<Gate>()) { gate_->skip = skip; }
  ~Stall() { let_go(); }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;

  /// For WorkersOptions::before_body.
  [[nodiscard]] std::function<void(std::uint32_t)> hook() const {
    return [gate = gate_](std::uint32_t thread) { thread == 0 ? gate->await_workers() : gate->hold(); };
  }
  void let_go() noexcept { gate_->open = true; }
  [[nodiscard]] bool holds() const noexcept { return gate_->held; }
  /// Lets go, and returns when nothing has the hook any more: the workers' threads have gone, the one held up included.
  void await_end() noexcept {
    let_go();
    while (gate_.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  struct Gate {
    std::uint32_t skip = 0;
    std::atomic<std::uint32_t> begun{0};    ///< bodies of workers
    std::atomic<std::uint32_t> callers{0};  ///< bodies of callers
    std::atomic<bool> held{false};
    std::atomic<bool> open{false};

    void hold() {
      if (begun.fetch_add(1) != skip) return;
      held = true;
      while (!open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    /// As many bodies as the callers, or a while: the last body of a call has nobody to wait for.
    void await_workers() {
      const std::uint32_t mine = callers.fetch_add(1);
      const auto patience = std::chrono::milliseconds(mine == 0 ? 20'000 : 5);
      const Deadline end = deadline_after(patience);
      while (!held && begun <= mine && RunClock::now() < end) std::this_thread::yield();
    }
  };
  std::shared_ptr<Gate> gate_;
};

}  // namespace sluice::test
