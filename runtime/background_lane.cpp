#include "runtime/background_lane.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::runtime {

struct BackgroundLane::State {
  /// Kept until it is awaited. A failure needs no memory then to be remembered.
  struct Job {
    std::function<void()> run;
    std::exception_ptr failure;
    bool done = false;
  };
  void work(const std::stop_token& stop) noexcept;

  std::mutex mutex;
  std::condition_variable_any posted;
  std::condition_variable finished;
  std::map<Ticket, Job> jobs;  // guarded by mutex
  Ticket last_posted = 0;      // guarded by mutex
  Ticket next = 1;             // to run; guarded by mutex
  bool running = false;        // guarded by mutex
};

BackgroundLane::BackgroundLane(std::chrono::milliseconds timeout)
    : timeout_(timeout),
      state_(std::make_shared<State>()),
      thread_([state = state_](const std::stop_token& stop) { state->work(stop); }) {}

BackgroundLane::~BackgroundLane() { (void)stop(); }

bool BackgroundLane::stop() noexcept {
  constexpr std::chrono::milliseconds kLeast{2'000};  // What is left behind costs more than that.
  thread_.request_stop();
  std::unique_lock lock(state_->mutex);
  const Deadline deadline = deadline_after(std::max(timeout_, kLeast));
  const bool idle = wait_on(state_->finished, lock, deadline, [&] { return !state_->running; });
  if (!idle && thread_.joinable()) thread_.detach();  // It owns the state, and nobody waits for it again.
  return idle;
}

BackgroundLane::Ticket BackgroundLane::post(std::function<void()> job) {
  const std::scoped_lock lock(state_->mutex);
  state_->jobs.emplace(state_->last_posted + 1, State::Job{.run = std::move(job), .failure = nullptr});
  state_->posted.notify_one();
  return ++state_->last_posted;
}

void BackgroundLane::await(Ticket ticket, Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  const auto job = state_->jobs.find(ticket);
  if (job == state_->jobs.end()) return;  // Awaited before.
  if (!wait_on(state_->finished, lock, deadline, [&] { return job->second.done; })) {
    throw Error(Errc::timeout, "the background lane did not finish in time; raise the timeout or use fewer threads");
  }
  const std::exception_ptr failure = job->second.failure;
  state_->jobs.erase(job);
  if (failure) std::rethrow_exception(failure);
}

void BackgroundLane::State::work(const std::stop_token& stop) noexcept {
  std::unique_lock lock(mutex);
  while (posted.wait(lock, stop, [&] { return next <= last_posted; })) {
    if (stop.stop_requested()) return;
    Job& job = jobs.find(next++)->second;
    running = true;
    lock.unlock();
    try {
      job.run();
    } catch (...) {
      job.failure = std::current_exception();
    }
    job.run = nullptr;  // What it captured goes before anyone may know that it has finished.
    lock.lock();
    running = false;
    job.done = true;
    finished.notify_all();
  }
}

}  // namespace sluice::runtime
