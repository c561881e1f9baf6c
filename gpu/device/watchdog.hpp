#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "sluice/device.hpp"

namespace sluice::gpu {

/// What a stream waits for, and what came of it.
struct FlagWait {
  /// Everything but `pending` is final.
  enum class Verdict { pending, reached, failed, late, abandoned, freed };
  struct Place {
    const void* stream = nullptr;            ///< whose wait it is
    const std::uint64_t* arrived = nullptr;  ///< the stream's pinned word: the last ticket that it got to
    std::uint64_t ticket = 0;
  };

  std::uint64_t* word = nullptr;
  std::uint64_t value = 0;
  Place place{};
  Deadline deadline{};  ///< once `timed`; the watchdog's
  bool timed = false;   ///< the stream has got to the wait; the watchdog's
  std::atomic<Verdict> verdict{Verdict::pending};
};

/// Why it failed; empty if it did not, or not yet.
[[nodiscard]] std::string reason_of(const FlagWait& wait, std::chrono::milliseconds timeout);

/// Keeps streams from waiting for ever. A stream's wait cannot be cancelled, only released through the word that it
/// looks at; so when a flag does not come in time, or its stream goes, the watchdog fails the flag in the producer's
/// place, by compare and swap. That is the one exception to a flag's single writer; a producer that comes too late
/// may still raise it higher.
/// One thread, which begins with the first wait and sleeps while no stream waits. All reads of flags are made under one
/// lock, which `forget` takes too, so a flag in memory of the device may go as soon as no stream waits for it any more.
/// Thread safety: full.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::milliseconds timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  /// Watches one wait; call before the stream can get there.  @throws Error{Errc::out_of_capacity} if there is no
  /// thread to be had for it
  [[nodiscard]] std::shared_ptr<FlagWait> watch(const Flag& flag, std::uint64_t value, const FlagWait::Place& place);
  /// The verdict, after a look at the flag if there was none yet.
  FlagWait::Verdict look(FlagWait& wait);
  /// The stream does not wait after all.
  void dismiss(FlagWait& wait) noexcept;
  /// Looks at every flag that a stream waits for: those that have come are not needed any more.
  void settle_all() noexcept;
  /// Releases every wait of a stream.
  void abandon(const void* stream) noexcept;
  /// The memory goes: what is not known about flags in it will not be known.
  void forget(std::span<const std::byte> memory) noexcept;

 private:
  /// Begins the thread, if it has not begun yet. The caller holds mutex_.
  void start();
  void run();
  void patrol();
  void settle(FlagWait& wait) noexcept;
  void release(std::uint64_t* word, std::uint64_t value, FlagWait::Verdict verdict) noexcept;
  void drop_settled() noexcept;

  const std::chrono::milliseconds timeout_;
  const std::chrono::microseconds period_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<FlagWait>> waits_;  ///< pending ones and some settled; guarded by mutex_
  bool asleep_ = false;                           ///< guarded by mutex_
  bool stopping_ = false;                         ///< guarded by mutex_
  std::thread thread_;                            ///< last: everything above outlives it
};

}  // namespace sluice::gpu
