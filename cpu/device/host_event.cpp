#include "cpu/device/host_event.hpp"

#include <utility>

#include "cpu/threads/spin.hpp"

namespace sluice::cpu {

void Point::pass(std::string reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    reason_ = std::move(reason);
    time_ = Clock::now();
    state_.store(reason_.empty() ? Event::State::done : Event::State::failed, std::memory_order_release);
  }
  passed_.notify_all();
}

bool Point::wait(const std::stop_token& stop) {
  const auto passed = [this] { return state() != Event::State::pending; };
  if (spin_until(passed)) return true;
  std::unique_lock lock(mutex_);
  return passed_.wait(lock, stop, passed);
}

Event::State HostEvent::state() const noexcept {
  const auto current = point();
  return current ? current->state() : State::done;
}

std::string HostEvent::reason() const {
  const auto current = point();
  return current && current->state() == State::failed ? current->reason() : std::string{};
}

Clock::time_point HostEvent::time() const noexcept {
  const auto current = point();
  return current && current->state() != State::pending ? current->time() : Clock::time_point{};
}

std::shared_ptr<Point> HostEvent::renew() {
  auto fresh = std::make_shared<Point>();
  const std::lock_guard lock(mutex_);
  point_ = fresh;
  return fresh;
}

std::shared_ptr<Point> HostEvent::point() const noexcept {
  const std::lock_guard lock(mutex_);
  return point_;
}

}  // namespace sluice::cpu
