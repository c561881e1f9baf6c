#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "sluice/permutation.hpp"

namespace sluice::test {

/// Makes threads late that answer: a little now and then, and one for long when it is told to. See
/// EngineOptions::before_answer.
class Late {
 public:
  /// `longest`: of what is a little; 0: never.
  void begin(std::uint64_t seed, std::chrono::microseconds longest) noexcept {
    seed_ = seed;
    longest_us_ = static_cast<std::uint64_t>(longest.count());
    stalls_ = -1;
  }
  /// The thread that comes as the `skip`-th from now is late by this much.
  void stall(std::uint32_t skip, std::chrono::milliseconds time) noexcept {
    stall_ms_ = time.count();
    stalls_ = static_cast<std::int64_t>(skip);
  }
  void come() noexcept {
    if (stalls_.load() >= 0 && stalls_.fetch_sub(1) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(stall_ms_.load()));
    const std::uint64_t longest = longest_us_;
    if (longest == 0) return;
    const std::uint64_t bits = mixed_bits(seed_ + ++comings_);
    if (bits % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(bits / 4 % (longest + 1)));
  }

 private:
  std::atomic<std::uint64_t> seed_{0};
  std::atomic<std::uint64_t> longest_us_{0};
  std::atomic<std::uint64_t> comings_{0};
  std::atomic<std::int64_t> stalls_{-1};
  std::atomic<std::int64_t> stall_ms_{0};
};

}  // namespace sluice::test
