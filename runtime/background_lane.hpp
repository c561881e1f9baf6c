#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// One thread that runs jobs in the order in which they were posted: the work of a step that nobody waits
/// for until the layer's next step.
/// Thread safety: post and await from one thread. The destructor finishes the running job and drops the rest.
class BackgroundLane {
 public:
  using Ticket = std::uint64_t;

  BackgroundLane();
  ~BackgroundLane();
  BackgroundLane(const BackgroundLane&) = delete;
  BackgroundLane& operator=(const BackgroundLane&) = delete;

  /// Tickets rise by one from 1.
  [[nodiscard]] Ticket post(std::function<void()> job);
  /// Returns when the job has run. Rethrows what it threw, once.
  /// @throws Error{Errc::timeout} past the deadline; the job is still queued or running then.
  void await(Ticket ticket, Deadline deadline);

 private:
  void work(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any posted_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> jobs_;            // guarded by mutex_
  std::map<Ticket, std::exception_ptr> failures_;     // guarded by mutex_
  Ticket last_posted_ = 0;                            // guarded by mutex_
  Ticket last_finished_ = 0;                          // guarded by mutex_
  std::jthread thread_;                               // Last: it uses all of the above.
};

}  // namespace sluice::runtime
