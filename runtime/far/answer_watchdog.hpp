#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <thread>

#include "sluice/step/forward_memory.hpp"

namespace sluice::runtime {

/// The question that was asked is answered: opens the gate for a device whose stream waits for that. Not if it was
/// given up before, when it may be closed for another one.
void open_gate(ForwardMailbox& mailbox, std::uint64_t asked) noexcept;

/// A thread that lets a stream of the device go on which waits for an answer that does not come in time, see
/// Handover::stream: of what waits by a kernel, the device's clock is the limit. Sleeps while no forward is under way.
/// Thread safety: the public functions from one thread.
class AnswerWatchdog {
 public:
  /// The mailbox must outlive it.
  /// @throws Error{Errc::out_of_capacity} if the system has no thread left.
  AnswerWatchdog(ForwardMailbox& mailbox, std::chrono::milliseconds timeout);
  AnswerWatchdog(const AnswerWatchdog&) = delete;
  AnswerWatchdog& operator=(const AnswerWatchdog&) = delete;
  /// When nobody answers any more. A forward that is under way all the same goes on without answers: it is waited for
  /// as long as one of them may take.
  ~AnswerWatchdog() = default;

  /// Forward `forward` may ask from now on.
  void wake(std::uint64_t forward);

 private:
  void work(const std::stop_token& stop);
  void drain();
  [[nodiscard]] bool under_way() const noexcept;

  ForwardMailbox& mailbox_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable_any woken_;
  std::uint64_t expected_ = 0;  ///< guarded by mutex_
  std::jthread thread_;         ///< last: it uses all of the above
};

}  // namespace sluice::runtime
