#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// Work of an engine beside its answers, in pieces that do not depend on each other: a look at a prompt, an audit, a
/// sequence that is parked. It owns what its pieces refer to, so that a thread that does not come back uses nothing
/// that is another's; see BorrowingJob for what cannot be owned. Thread safety: all calls, from any thread.
class Job {
 public:
  /// `piece(i)` for 0 <= i < pieces, each once, in any order and by any thread.
  Job(std::uint32_t pieces, std::function<void(std::uint32_t)> piece) : pieces_(pieces), piece_(std::move(piece)) {}

  /// Does one piece. False: none is left to begin. One that throws is the last to be begun.
  bool work() noexcept;
  /// No piece is begun any more.
  void abandon() noexcept;
  /// Whether a piece is left to begin.
  [[nodiscard]] bool left() const noexcept;
  /// Whether no piece is left to begin, and none under way.
  [[nodiscard]] bool idle() const noexcept;
  /// Helps until no piece is left to begin, then waits for those under way. False, and it is abandoned, if one takes
  /// longer than `timeout` then; what the caller does itself is not watched.
  [[nodiscard]] bool await(std::chrono::milliseconds timeout) noexcept;
  /// What the first piece that failed has thrown; once. While it is idle.
  void rethrow();

  /// When it began and ended. While it is idle.
  struct Span {
    Clock::time_point begin{}, end{};
  };
  [[nodiscard]] Span span() const noexcept;

 private:
  const std::uint32_t pieces_;
  const std::function<void(std::uint32_t)> piece_;
  mutable std::mutex mutex_;  ///< of all that follows
  std::uint32_t next_ = 0;
  std::uint32_t under_way_ = 0;
  Span span_{};
  std::exception_ptr failure_;
};

/// Jobs that threads are to do when they have nothing better to do, the oldest first.
/// Thread safety: all calls, from any thread.
class Jobs {
 public:
  void add(std::shared_ptr<Job> job);
  /// Lets go of the oldest that are done. Where callers alone have time for jobs, nothing else does.
  void forget_done() noexcept;
  /// Whether there may be something to do. Costs one load.
  [[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }
  /// Does a piece of the oldest that has one left. False: none has.
  bool work() noexcept;

 private:
  /// The oldest with a piece left, or null; forgets those that have none.
  [[nodiscard]] std::shared_ptr<Job> oldest() noexcept;

  std::atomic<std::size_t> count_{0};
  std::mutex mutex_;
  std::deque<std::shared_ptr<Job>> jobs_;  ///< guarded by mutex_
};

}  // namespace sluice::runtime
