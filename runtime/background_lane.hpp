#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// One thread that runs jobs in the order in which they were posted: the work of a step that nobody waits
/// for until the layer's next step.
/// Thread safety: post and await from one thread. The destructor drops what has not begun and waits up to `timeout`,
/// or two seconds if that is less, for the running job; a job that takes longer is left behind with its thread, and
/// what it refers to must stay.
class BackgroundLane {
 public:
  using Ticket = std::uint64_t;

  explicit BackgroundLane(std::chrono::milliseconds timeout);
  ~BackgroundLane();
  BackgroundLane(const BackgroundLane&) = delete;
  BackgroundLane& operator=(const BackgroundLane&) = delete;

  /// Tickets rise by one from 1.
  [[nodiscard]] Ticket post(std::function<void()> job);
  /// Returns when the job has run. Rethrows what it threw, once.
  /// @throws Error{Errc::timeout} past the deadline; the job is still queued or running then.
  void await(Ticket ticket, Deadline deadline);
  /// What the destructor does. False if a job was left behind. Nothing may be posted afterwards.
  [[nodiscard]] bool stop() noexcept;

 private:
  struct State;

  const std::chrono::milliseconds timeout_;
  std::shared_ptr<State> state_;  // Also the thread's, which may be left behind.
  std::jthread thread_;           // Last: it uses all of the above.
};

}  // namespace sluice::runtime
