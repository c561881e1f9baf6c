#include "cpu/threads/team.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "cpu/threads/spin.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {
namespace {

/// One run. Whoever helps draws indices until none is left or a body has thrown.
class Job {
 public:
  void begin(std::uint32_t count, std::function<void(std::uint32_t)> body) noexcept {
    count_ = count;
    body_ = std::move(body);
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
  }
  /// True if there was anything to do.
  bool help(const std::function<void(std::uint32_t)>& before_body, std::uint32_t thread) noexcept {
    bool any = false;
    try {
      while (!failed_.load(std::memory_order_relaxed)) {
        const std::uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) break;
        any = true;
        if (before_body) before_body(thread);
        body_(static_cast<std::uint32_t>(i));
      }
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    return any;
  }
  [[nodiscard]] bool exhausted() const noexcept { return next_.load(std::memory_order_relaxed) >= count_; }
  /// Drops the body; returns what it threw. Only when all helpers have left.
  [[nodiscard]] std::exception_ptr end() noexcept {
    body_ = nullptr;
    return std::exchange(error_, nullptr);
  }

 private:
  std::uint32_t count_ = 0;
  std::function<void(std::uint32_t)> body_;
  alignas(64) std::atomic<std::uint64_t> next_{0};  ///< 64 bits: every helper overshoots `count_` by one
  alignas(64) std::atomic<bool> failed_{false};
  std::exception_ptr error_;  ///< written by the one who raised `failed_`
};

/// Where helpers find a job. `users` counts the helpers that may read it: the owner takes the job away, then waits
/// until there are none. The job and its body lie here, not with their owner, who may give up before a helper comes
/// back; the slot then stays taken.
struct alignas(64) Slot {
  std::atomic<bool> taken{false};
  std::atomic<Job*> job{nullptr};
  std::atomic<std::uint32_t> users{0};
  std::atomic<bool> abandoned{false};  ///< the owner gave up
  Job work;
};

/// The slot that a helper works in; null between jobs.
struct alignas(64) Post {
  std::atomic<const Slot*> at{nullptr};
};

/// Jobs at a time; a caller that finds no slot works alone.
constexpr std::size_t kSlots = 16;

}  // namespace

struct Team::State {
  explicit State(Options wanted) : options(std::move(wanted)), posts(options.helpers) {}

  [[nodiscard]] Slot* take_slot() noexcept;
  [[nodiscard]] bool help_any(std::uint32_t helper) noexcept;
  void work(std::uint32_t helper) noexcept;
  void stop() noexcept;
  /// Returns when no helper is in the slot any more.  @throws Error{Errc::timeout}; the team is lost then.
  void await_helpers(Slot& slot);
  /// "worker 2 (core 5)" for each helper in the slot; empty if there is none.
  [[nodiscard]] std::string workers_in(const Slot& slot) const;
  /// A helper is in a slot whose owner gave up.
  [[nodiscard]] bool stuck() const noexcept;
  /// Destroys what is kept if no helper is stuck any more. By a helper that has left a slot.
  void drop_kept() noexcept;

  const Options options;
  std::array<Slot, kSlots> slots;
  std::vector<Post> posts;                          ///< [helpers]
  alignas(64) std::atomic<std::uint32_t> epoch{0};  ///< rises with every job; sleepers wait for that
  std::atomic<bool> stopped{false};
  alignas(64) std::atomic<bool> lost{false};
  std::mutex mutex;
  std::unique_ptr<Kept> kept;  ///< a list; guarded by mutex
};

Team::Team(Options options) : state_(std::make_shared<State>(std::move(options))) {
  try {
    for (std::uint32_t i = 0; i < state_->options.helpers; ++i)
      threads_.emplace_back([state = state_, i] { state->work(i); });
  } catch (const std::system_error& error) {
    state_->stop();
    threads_.clear();
    throw Error(Errc::out_of_capacity, std::string("the system has no thread left (") + error.what() +
                                           "); use fewer threads or raise the limit (ulimit -u, pids.max)");
  }
}

Team::~Team() {
  state_->stop();
  for (std::size_t i = 0; i < threads_.size() && lost(); ++i) {
    // Memory that is kept may own the team, and the helper that was stuck destroys it.
    const bool own = threads_[i].get_id() == std::this_thread::get_id();
    if (own || state_->posts[i].at.load() != nullptr) threads_[i].detach();
  }
}

bool Team::lost() const noexcept { return state_->lost.load(std::memory_order_relaxed); }

void Team::run(std::uint32_t count, std::function<void(std::uint32_t)> body) {
  if (lost()) {
    throw Error(Errc::timeout,
                "these worker threads are lost: one did not return from an earlier call; destroy their owner");
  }
  Slot* const slot = count > 1 ? state_->take_slot() : nullptr;
  if (slot == nullptr) {
    for (std::uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  // Sequentially consistent with help_any: either a helper sees the job gone, or this thread sees the helper.
  slot->work.begin(count, std::move(body));
  slot->job.store(&slot->work);
  ++state_->epoch;
  state_->epoch.notify_all();
  slot->work.help(state_->options.before_body, 0);
  slot->job.store(nullptr);
  state_->await_helpers(*slot);
  const std::exception_ptr error = slot->work.end();
  slot->taken.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

Slot* Team::State::take_slot() noexcept {
  for (Slot& slot : slots) {
    if (!slot.taken.load(std::memory_order_relaxed) && !slot.taken.exchange(true, std::memory_order_acquire))
      return &slot;
  }
  return nullptr;
}

void Team::State::await_helpers(Slot& slot) {
  constexpr std::chrono::microseconds kSpinTime{200};
  constexpr std::chrono::microseconds kNap{20};
  const Clock::time_point spin_end = Clock::now() + kSpinTime;
  while (slot.users.load() != 0 && Clock::now() < spin_end) relax();
  if (slot.users.load() == 0) return;
  const Deadline deadline = deadline_after(options.timeout);
  while (slot.users.load() != 0) {
    std::this_thread::sleep_for(kNap);  // A body that runs on needs the core more, should cores be scarce.
    if (RunClock::now() < deadline) continue;
    // Nobody: the last has just left.
    const std::string who = workers_in(slot);
    if (who.empty()) continue;
    slot.abandoned = true;
    lost = true;
    throw Error(Errc::timeout, who + " did not return from a share of parallel work within " +
                                   std::to_string(options.timeout.count()) +
                                   " ms; these worker threads are lost, destroy their owner; if the machine is merely "
                                   "busy, raise the timeout or use fewer threads");
  }
}

std::string Team::State::workers_in(const Slot& slot) const {
  std::string names;
  for (std::size_t i = 0; i < posts.size(); ++i) {
    if (posts[i].at.load() != &slot) continue;
    if (!names.empty()) names += ", ";
    names += "worker " + std::to_string(i + 1);
    if (!options.cores.empty()) names += " (core " + std::to_string(options.cores[i]) + ")";
  }
  return names;
}

bool Team::State::help_any(std::uint32_t helper) noexcept {
  Post& post = posts[helper];
  bool helped = false;
  for (Slot& slot : slots) {
    if (slot.job.load(std::memory_order_relaxed) == nullptr) continue;
    // Before `users`: an owner who sees this helper in the slot also finds its name.
    post.at.store(&slot, std::memory_order_relaxed);
    ++slot.users;
    Job* const job = slot.job.load();
    if (job != nullptr && !job->exhausted()) helped |= job->help(options.before_body, helper + 1);
    post.at.store(nullptr, std::memory_order_relaxed);
    --slot.users;
    if (lost.load()) drop_kept();
  }
  return helped;
}

// Sequentially consistent with help_any: a helper that leaves without seeing `lost` is not counted as stuck here.
void Team::keep(std::unique_ptr<Kept> memory) noexcept {
  const std::shared_ptr<State> state = state_;  // A helper may destroy the team as soon as it finds the memory.
  const std::lock_guard lock(state->mutex);
  if (!state->stuck()) return;
  memory->next_ = std::move(state->kept);
  state->kept = std::move(memory);
}

bool Team::State::stuck() const noexcept {
  return std::any_of(slots.begin(), slots.end(),
                     [](const Slot& slot) { return slot.abandoned.load() && slot.users.load() != 0; });
}

void Team::State::drop_kept() noexcept {
  std::unique_ptr<Kept> gone;
  {
    const std::lock_guard lock(mutex);
    if (stuck()) return;
    gone = std::move(kept);
  }
  while (gone) gone = std::move(gone->next_);
}

void Team::State::work(std::uint32_t helper) noexcept {
  if (options.on_start) options.on_start(helper);
  for (;;) {
    // The epoch first: a stop that is not seen below raises it afterwards, and the wait at the end returns at once.
    const std::uint32_t now = epoch.load();
    if (stopped.load()) return;
    const Clock::time_point sleep_at = Clock::now() + options.spin;
    bool helped = help_any(helper);
    while (!helped && epoch.load(std::memory_order_relaxed) == now && Clock::now() < sleep_at) {
      for (int i = 0; i < 16; ++i) relax();
    }
    if (!helped && epoch.load() == now) epoch.wait(now);
  }
}

void Team::State::stop() noexcept {
  stopped = true;
  ++epoch;
  epoch.notify_all();
}

}  // namespace sluice::cpu
