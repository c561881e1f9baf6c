#include "runtime/background/job.hpp"

#include <thread>
#include <utility>

#include "sluice/run_clock.hpp"

namespace sluice::runtime {

bool Job::work() noexcept {
  std::uint32_t piece = 0;
  {
    const std::lock_guard lock(mutex_);
    if (next_ >= pieces_) return false;
    if (next_ == 0) span_.begin = Clock::now();
    piece = next_++;
    ++under_way_;
  }
  std::exception_ptr failure;
  try {
    piece_(piece);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  if (failure) {
    if (!failure_) failure_ = std::move(failure);
    next_ = pieces_;
  }
  --under_way_;
  span_.end = Clock::now();
  return true;
}

void Job::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  next_ = pieces_;
}

bool Job::left() const noexcept {
  const std::lock_guard lock(mutex_);
  return next_ < pieces_;
}

bool Job::idle() const noexcept {
  const std::lock_guard lock(mutex_);
  return next_ >= pieces_ && under_way_ == 0;
}

bool Job::await(std::chrono::milliseconds timeout) noexcept {
  constexpr std::chrono::microseconds kNap{50};
  while (work()) {
  }
  const Deadline deadline = deadline_after(timeout);
  while (!idle()) {
    if (RunClock::now() >= deadline) {
      abandon();
      return idle();
    }
    std::this_thread::sleep_for(kNap);  // A piece that runs on needs the core more, should cores be scarce.
  }
  return true;
}

void Job::rethrow() {
  std::exception_ptr failure;  // The caller's alone: threads may let go of the job while it reads what was thrown.
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(std::move(failure));
}

Job::Span Job::span() const noexcept {
  const std::lock_guard lock(mutex_);
  return span_;
}

void Jobs::add(std::shared_ptr<Job> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  count_.store(jobs_.size(), std::memory_order_release);
}

void Jobs::forget_done() noexcept { (void)oldest(); }

std::shared_ptr<Job> Jobs::oldest() noexcept {
  while (true) {
    std::shared_ptr<Job> gone;  // Freed when the lock is free again: it may own much.
    const std::lock_guard lock(mutex_);
    if (jobs_.empty()) return nullptr;
    if (jobs_.front()->left()) return jobs_.front();
    gone = std::move(jobs_.front());
    jobs_.pop_front();
    count_.store(jobs_.size(), std::memory_order_release);
  }
}

bool Jobs::work() noexcept {
  while (const std::shared_ptr<Job> job = oldest()) {
    if (job->work()) return true;
  }
  return false;
}

}  // namespace sluice::runtime
