#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace sluice::cpu {

class Job;

/// Threads that wait for work by spinning, then by sleeping. A layer of a decode step gives its workers some
/// 50 us of work every 100 us or so: a sleeping thread would take that long to wake.
/// Thread safety: `run` may be called from several threads at once, and from inside a body.
class Team {
 public:
  struct Options {
    std::uint32_t helpers = 1;                           ///< threads beside the callers
    std::chrono::microseconds spin{0};                   ///< how long a helper looks for work before it sleeps
    std::function<void(std::uint32_t helper)> on_start;  ///< on each helper, first; must not throw; may be empty
  };
  explicit Team(Options options);
  /// Nothing may run any more.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Calls body(i) for 0 <= i < count, each once, on the caller and on whoever is free, and returns when all
  /// have returned. The first exception of a body is rethrown; indices not begun by then are left out.
  void run(std::uint32_t count, const std::function<void(std::uint32_t)>& body);

 private:
  /// Where helpers find a job. `users` counts those who may be looking at it: the owner takes the job away,
  /// then waits until nobody is.
  struct alignas(64) Slot {
    std::atomic<bool> taken{false};
    std::atomic<Job*> job{nullptr};
    std::atomic<std::uint32_t> users{0};
  };
  /// Jobs at a time; a caller that finds no slot works alone.
  static constexpr std::size_t kSlots = 16;

  [[nodiscard]] Slot* take_slot() noexcept;
  void work(std::uint32_t helper) noexcept;
  [[nodiscard]] bool help_any() noexcept;

  const Options options_;
  std::array<Slot, kSlots> slots_;
  alignas(64) std::atomic<std::uint32_t> epoch_{0};  ///< rises with every job; sleepers wait for that
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> threads_;  ///< last: they stop before anything above goes
};

}  // namespace sluice::cpu
