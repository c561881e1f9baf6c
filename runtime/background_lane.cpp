#include "runtime/background_lane.hpp"

#include <utility>

#include "sluice/error.hpp"

namespace sluice::runtime {

BackgroundLane::BackgroundLane() : thread_([this](const std::stop_token& stop) { work(stop); }) {}

BackgroundLane::~BackgroundLane() = default;

BackgroundLane::Ticket BackgroundLane::post(std::function<void()> job) {
  const std::scoped_lock lock(mutex_);
  jobs_.push_back(std::move(job));
  posted_.notify_one();
  return ++last_posted_;
}

void BackgroundLane::await(Ticket ticket, Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!finished_.wait_until(lock, deadline, [&] { return last_finished_ >= ticket; })) {
    throw Error(Errc::timeout, "the background lane did not finish in time; raise the timeout or use fewer threads");
  }
  if (const auto failure = failures_.extract(ticket)) std::rethrow_exception(failure.mapped());
}

void BackgroundLane::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (posted_.wait(lock, stop, [&] { return !jobs_.empty(); })) {
    if (stop.stop_requested()) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    ++last_finished_;
    if (failure) failures_.emplace(last_finished_, failure);
    finished_.notify_all();
  }
}

}  // namespace sluice::runtime
