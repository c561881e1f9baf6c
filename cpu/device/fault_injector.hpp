#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "cpu/device/host_device.hpp"

namespace sluice::cpu {

/// SplitMix64: a seeded sequence that is the same on every platform and standard library.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept;
  /// Uniform in [0, 1).
  double chance() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Uniform in [0, limit); 0 for an empty range.
  std::uint64_t below(std::uint64_t limit) noexcept { return limit == 0 ? 0 : next() % limit; }

 private:
  std::uint64_t state_;
};

enum class FaultSite { copy, verb, allocation, registration, other };

/// What becomes of one operation.
struct Fault {
  std::chrono::microseconds delay{0};
  bool reorder = false;
  bool fails = false;
  std::uint64_t seed = 0;  ///< of everything else: the order of copies, how many of them a failure lets through
};

/// How the device fails now, shared by the device and its streams, and a count of what it did.
/// Thread safety: full.
class FaultInjector {
 public:
  explicit FaultInjector(const FaultOptions& faults) : now_(faults) {}

  /// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
  static void validate(const FaultOptions& faults);

  void change(const FaultOptions& faults);
  void count_failure() noexcept { failures_.fetch_add(1, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t failures() const noexcept { return failures_.load(std::memory_order_relaxed); }

 private:
  friend class FaultSequence;

  std::mutex mutex_;
  FaultOptions now_;         ///< guarded by mutex_
  std::uint64_t epoch_ = 1;  ///< guarded by mutex_; raised by `change`
  std::atomic<std::uint64_t> failures_{0};
};

/// Decides the faults of one actor (the device itself, or one stream) when its operations are enqueued. Each
/// actor draws from a generator of its own, and the same number of values for every operation, so a run
/// repeats whatever the threads do, and changing one chance leaves the other decisions alone.
/// Thread safety: one thread at a time.
class FaultSequence {
 public:
  FaultSequence(FaultInjector& injector, std::uint64_t actor) noexcept
      : injector_(injector), actor_(actor), generator_(0) {}
  [[nodiscard]] Fault next(FaultSite site);

 private:
  FaultInjector& injector_;
  std::uint64_t actor_;
  std::uint64_t epoch_ = 0;  ///< of the seed that generator_ has; older than any real one
  Generator generator_;
};

}  // namespace sluice::cpu
