#include "cpu/threads/crew.hpp"

#include <cstdint>
#include <mutex>
#include <utility>

#include "sluice/run_clock.hpp"

namespace sluice::cpu {

struct Crew::State {
  std::mutex mutex;
  std::uint32_t working = 0;   ///< threads; guarded by mutex, as is the next
  std::unique_ptr<Kept> kept;  ///< null, or the owner

  [[nodiscard]] bool ended() {
    const std::lock_guard lock(mutex);
    return working == 0;
  }
  /// A thread is about to end.
  void leave() {
    std::unique_ptr<Kept> gone;  // Destroyed when the lock is free again.
    const std::lock_guard lock(mutex);
    if (--working == 0) gone = std::move(kept);
  }
};

Crew::Crew() : state_(std::make_shared<State>()) {}

void Crew::add(std::function<void(const std::stop_token&)> work) {
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->working;
  }
  try {
    threads_.emplace_back([state = state_, work = std::move(work)](const std::stop_token& stop) {
      work(stop);
      state->leave();
    });
  } catch (...) {
    state_->leave();
    throw;
  }
}

bool Crew::stop(std::chrono::milliseconds timeout) noexcept {
  constexpr std::chrono::microseconds kNap{50};
  for (std::jthread& thread : threads_) thread.request_stop();
  const Deadline deadline = deadline_after(timeout);
  while (!state_->ended()) {
    if (RunClock::now() >= deadline) return state_->ended();
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

void Crew::keep(std::unique_ptr<Kept> owner) noexcept {
  const std::shared_ptr<State> state = state_;  // A thread may destroy the crew as soon as it finds the owner.
  const std::lock_guard lock(state->mutex);
  if (state->working == 0) return;
  for (std::jthread& thread : threads_) thread.detach();
  state->kept = std::move(owner);
}

}  // namespace sluice::cpu
