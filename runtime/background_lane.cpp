#include "runtime/background_lane.hpp"

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::runtime {

struct BackgroundLane::State {
  void work(const std::stop_token& stop);

  std::mutex mutex;
  std::condition_variable_any posted;
  std::condition_variable finished;
  std::deque<std::function<void()>> jobs;         // guarded by mutex
  std::map<Ticket, std::exception_ptr> failures;  // guarded by mutex
  Ticket last_posted = 0;                         // guarded by mutex
  Ticket last_finished = 0;                       // guarded by mutex
  bool running = false;                           // guarded by mutex
};

BackgroundLane::BackgroundLane(std::chrono::milliseconds timeout)
    : timeout_(timeout),
      state_(std::make_shared<State>()),
      thread_([state = state_](const std::stop_token& stop) { state->work(stop); }) {}

BackgroundLane::~BackgroundLane() {
  thread_.request_stop();
  std::unique_lock lock(state_->mutex);
  const bool idle = state_->finished.wait_until(lock, deadline_after(timeout_), [&] { return !state_->running; });
  if (!idle) thread_.detach();
}

BackgroundLane::Ticket BackgroundLane::post(std::function<void()> job) {
  const std::scoped_lock lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  state_->posted.notify_one();
  return ++state_->last_posted;
}

void BackgroundLane::await(Ticket ticket, Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  if (!state_->finished.wait_until(lock, deadline, [&] { return state_->last_finished >= ticket; })) {
    throw Error(Errc::timeout, "the background lane did not finish in time; raise the timeout or use fewer threads");
  }
  if (const auto failure = state_->failures.extract(ticket)) std::rethrow_exception(failure.mapped());
}

void BackgroundLane::State::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  while (posted.wait(lock, stop, [&] { return !jobs.empty(); })) {
    if (stop.stop_requested()) return;
    std::function<void()> job = std::move(jobs.front());
    jobs.pop_front();
    running = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    job = nullptr;  // What it captured goes before anyone may know that it has finished.
    lock.lock();
    running = false;
    ++last_finished;
    if (failure) failures.emplace(last_finished, failure);
    finished.notify_all();
  }
}

}  // namespace sluice::runtime
