#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <thread>

#include "sluice/permutation.hpp"

namespace sluice::test {

/// What goes wrong with threads: those that answer are late, a little now and then, and one for long when it is told
/// to; and one that computes for a device, or takes a plan, finds no memory. Thread safety: `answer`, `compute` and
/// `starved_apply` may be called by any threads.
class Faults {
 public:
  /// `longest`: of what is a little; 0: never.
  void begin(std::uint64_t seed, std::chrono::microseconds longest) noexcept {
    seed_ = seed;
    longest_us_ = static_cast<std::uint64_t>(longest.count());
    stop();
  }
  /// From now on nobody is late for long, and memory is found.
  void stop() noexcept { stalls_ = breaks_ = starves_ = -1; }
  /// The thread that comes as the `skip`-th from now to answer is late by this much.
  void stall(std::uint32_t skip, std::chrono::milliseconds time) noexcept {
    stall_ms_ = time.count();
    stalls_ = static_cast<std::int64_t>(skip);
  }
  /// The `skip`-th body from now fails.
  void break_one(std::uint32_t skip) noexcept { breaks_ = static_cast<std::int64_t>(skip); }
  /// The next plan that a device takes finds memory `skip` times, and not again.
  void starve_apply(std::uint32_t skip) noexcept { starves_ = static_cast<std::int64_t>(skip); }

  /// For EngineOptions::before_answer.
  void answer() noexcept {
    if (stalls_.load() >= 0 && stalls_.fetch_sub(1) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(stall_ms_.load()));
    const std::uint64_t longest = longest_us_;
    if (longest == 0) return;
    const std::uint64_t bits = mixed_bits(seed_ + ++answers_);
    if (bits % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(bits / 4 % (longest + 1)));
  }
  /// For cpu::WorkersOptions::before_body.
  void compute() {
    if (breaks_.load() >= 0 && breaks_.fetch_sub(1) == 0) throw std::bad_alloc();
  }
  /// The allocation that fails in the next plan; negative: none.
  std::int64_t starved_apply() noexcept { return starves_.exchange(-1); }

 private:
  std::atomic<std::uint64_t> seed_{0};
  std::atomic<std::uint64_t> longest_us_{0};
  std::atomic<std::uint64_t> answers_{0};
  std::atomic<std::int64_t> stalls_{-1};
  std::atomic<std::int64_t> stall_ms_{0};
  std::atomic<std::int64_t> breaks_{-1};
  std::atomic<std::int64_t> starves_{-1};
};

}  // namespace sluice::test
