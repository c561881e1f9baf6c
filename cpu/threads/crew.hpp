#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <stop_token>
#include <thread>
#include <vector>

#include "cpu/threads/kept.hpp"

namespace sluice::cpu {

/// Threads of an owner that work until they are asked to stop. Should one not come back then, the owner is left behind
/// with it: the last thread to end destroys the owner.
/// Thread safety: calls from one thread.
class Crew {
 public:
  Crew();
  /// Asks the threads to stop and waits for them, without a deadline: who cannot be sure of them calls `stop` first.
  ~Crew() = default;
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// @throws std::system_error if the system has no thread left
  void add(std::function<void(const std::stop_token&)> work);
  /// The system's, of the index-th that was added, until `stop`.
  [[nodiscard]] std::thread::native_handle_type handle(std::size_t index) { return threads_[index].native_handle(); }
  /// Asks the threads to stop. Whether all have ended within `timeout`.
  [[nodiscard]] bool stop(std::chrono::milliseconds timeout) noexcept;
  /// Destroys `owner` when the last thread has ended: at once, on that thread, or never. It may own the crew. After
  /// `stop`.
  void keep(std::unique_ptr<Kept> owner) noexcept;

 private:
  struct State;

  std::shared_ptr<State> state_;       ///< also of every thread
  std::vector<std::jthread> threads_;  ///< last: they stop before anything above goes
};

}  // namespace sluice::cpu
