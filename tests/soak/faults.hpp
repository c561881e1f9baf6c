#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <thread>

#include "sluice/step/permutation.hpp"
#include "tests/support/failing_new.hpp"

namespace sluice::test {

/// What went wrong with threads so far.
struct FaultCounts {
  std::uint64_t delays = 0;     ///< of threads that answer, short ones
  std::uint64_t stalls = 0;     ///< long ones
  std::uint64_t breaks = 0;     ///< bodies, and launches that were refused
  std::uint64_t starved = 0;    ///< plans that a device was to find no memory for
  std::uint64_t shortages = 0;  ///< threads that answer of which an allocation was to fail
};

/// What goes wrong with threads: those that answer are late, a little now and then, and one for long when it is told
/// to, or find no memory; and one that computes for a device, or takes a plan, finds none. Thread safety: `answer`,
/// `compute`, `breaks_now`, `starved_apply` and `counts` may be called by any threads.
class Faults {
 public:
  /// `longest`: of what is a little; 0: never. To be called by who drives the engine.
  void begin(std::uint64_t seed, std::chrono::microseconds longest) noexcept {
    seed_ = seed;
    longest_us_ = static_cast<std::uint64_t>(longest.count());
    caller_ = std::this_thread::get_id();
    stop();
  }
  /// From now on nobody is late for long, and memory is found.
  void stop() noexcept { stalls_ = breaks_ = starves_ = shortages_ = -1; }
  /// The thread that comes as the `skip`-th from now to answer is late by this much.
  void stall(std::uint32_t skip, std::chrono::milliseconds time) noexcept {
    stall_ms_ = time.count();
    stalls_ = static_cast<std::int64_t>(skip);
  }
  /// The `skip`-th body from now fails.
  void break_one(std::uint32_t skip) noexcept { breaks_ = static_cast<std::int64_t>(skip); }
  /// The next plan that a device takes finds memory `skip` times, and not again.
  void starve_apply(std::uint32_t skip) noexcept { starves_ = static_cast<std::int64_t>(skip); }
  /// Threads that come from the `skip`-th on from now to answer, a few of them, find memory `times`, and not again in
  /// that piece.
  void starve_answers(std::uint32_t skip, std::uint32_t times) noexcept {
    shortage_after_ = static_cast<long>(times);
    shortages_ = static_cast<std::int64_t>(skip) + kShortages;
  }

  /// For EngineOptions::before_answer.
  void answer() noexcept {
    run_short();
    if (strikes(stalls_)) {
      ++stall_count_;
      std::this_thread::sleep_for(std::chrono::milliseconds(stall_ms_.load()));
    }
    const std::uint64_t longest = longest_us_;
    if (longest == 0) return;
    const std::uint64_t bits = mixed_bits(seed_ + ++answers_);
    if (bits % 4 != 0) return;
    ++delay_count_;
    std::this_thread::sleep_for(std::chrono::microseconds(bits / 4 % (longest + 1)));
  }
  /// For cpu::WorkersOptions::before_body.
  void compute() {
    if (breaks_now()) throw std::bad_alloc();
  }
  [[nodiscard]] bool breaks_now() noexcept {
    if (!strikes(breaks_)) return false;
    ++break_count_;
    return true;
  }
  /// The allocation that fails in the next plan; negative: none.
  [[nodiscard]] std::int64_t starved_apply() noexcept {
    const std::int64_t which = starves_.exchange(-1);
    if (which >= 0) ++starve_count_;
    return which;
  }
  [[nodiscard]] FaultCounts counts() const noexcept {
    return {.delays = delay_count_,
            .stalls = stall_count_,
            .breaks = break_count_,
            .starved = starve_count_,
            .shortages = shortage_count_};
  }

 private:
  using Countdown = std::atomic<std::int64_t>;
  static constexpr std::int64_t kShortages = 12;  ///< pieces; most of them attend, and need none
  [[nodiscard]] static bool strikes(Countdown& left) noexcept { return left.load() >= 0 && left.fetch_sub(1) == 0; }
  /// Of threads of the engine alone: who drives it allocates for the soak, too.
  void run_short() noexcept {
    if (std::this_thread::get_id() == caller_.load()) return;
    fail_own_allocation(-1);  // Of the piece before.
    const std::int64_t left = shortages_ < 0 ? -1 : shortages_.fetch_sub(1);
    if (left < 0 || left > kShortages) return;
    ++shortage_count_;
    fail_own_allocation(shortage_after_);
  }

  std::atomic<std::uint64_t> seed_{0};
  std::atomic<std::uint64_t> longest_us_{0};
  std::atomic<std::thread::id> caller_{};
  std::atomic<std::uint64_t> answers_{0};
  Countdown stalls_{-1};
  std::atomic<std::int64_t> stall_ms_{0};
  Countdown breaks_{-1};
  Countdown starves_{-1};
  Countdown shortages_{-1};
  std::atomic<long> shortage_after_{0};
  std::atomic<std::uint64_t> delay_count_{0}, stall_count_{0}, break_count_{0}, starve_count_{0}, shortage_count_{0};
};

}  // namespace sluice::test
