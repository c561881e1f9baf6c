#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>

#include "sluice/device.hpp"

namespace sluice::cpu {

/// One passage of a stream through one `record`: pending until the stream gets there, then done or failed
/// for good. Shared by the event, the stream that passes and the streams that wait.
class Point {
 public:
  [[nodiscard]] Event::State state() const noexcept { return state_.load(std::memory_order_acquire); }
  /// Valid once the state is not pending.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] Clock::time_point time() const noexcept { return time_; }

  /// Passes the point: done if `reason` is empty. Call once.
  void pass(std::string reason) noexcept;
  /// Blocks until the point is passed. False if `stop` came first.
  bool wait(const std::stop_token& stop);

 private:
  std::mutex mutex_;
  std::condition_variable_any passed_;
  std::string reason_;      ///< written before state_ leaves pending
  Clock::time_point time_;  ///< likewise
  std::atomic<Event::State> state_{Event::State::pending};
};

/// An event is the latest point that was recorded into it.
class HostEvent final : public Event {
 public:
  [[nodiscard]] State state() const noexcept override;
  [[nodiscard]] std::string reason() const override;
  [[nodiscard]] Clock::time_point time() const noexcept override;

  /// A new, pending point in place of the old one.
  [[nodiscard]] std::shared_ptr<Point> renew();
  /// Null if never recorded.
  [[nodiscard]] std::shared_ptr<Point> point() const noexcept;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Point> point_;  ///< guarded by mutex_
};

}  // namespace sluice::cpu
