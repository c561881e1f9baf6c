#include "cpu/team.hpp"

#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

using Clock = std::chrono::steady_clock;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

/// One run. Whoever helps draws indices until none is left or a body has thrown.
class Job {
 public:
  Job(std::uint32_t count, const std::function<void(std::uint32_t)>& body) : count_(count), body_(body) {}

  /// True if there was anything to do.
  bool help() noexcept {
    bool any = false;
    try {
      while (!failed_.load(std::memory_order_relaxed)) {
        const std::uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) break;
        any = true;
        body_(static_cast<std::uint32_t>(i));
      }
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    return any;
  }
  [[nodiscard]] bool exhausted() const noexcept { return next_.load(std::memory_order_relaxed) >= count_; }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::uint32_t count_;
  const std::function<void(std::uint32_t)>& body_;
  alignas(64) std::atomic<std::uint64_t> next_{0};  ///< 64 bits: every helper overshoots `count_` by one
  alignas(64) std::atomic<bool> failed_{false};
  std::exception_ptr error_;  ///< written by the one who raised `failed_`; read when all have left
};

Team::Team(Options options) : options_(std::move(options)) {
  try {
    for (std::uint32_t i = 0; i < options_.helpers; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    stop_ = true;
    ++epoch_;
    epoch_.notify_all();
    threads_.clear();
    throw Error(Errc::out_of_capacity, std::string("the system has no thread left (") + error.what() +
                                           "); use fewer threads or raise the limit (ulimit -u)");
  }
}

Team::~Team() {
  stop_ = true;
  ++epoch_;
  epoch_.notify_all();
}

Team::Slot* Team::take_slot() noexcept {
  for (Slot& slot : slots_) {
    if (!slot.taken.load(std::memory_order_relaxed) && !slot.taken.exchange(true, std::memory_order_acquire))
      return &slot;
  }
  return nullptr;
}

void Team::run(std::uint32_t count, const std::function<void(std::uint32_t)>& body) {
  Job job(count, body);
  Slot* const slot = count > 1 ? take_slot() : nullptr;
  if (slot == nullptr) {
    job.help();
    job.rethrow();
    return;
  }
  // Sequentially consistent with help_any: either a helper sees the job gone, or this thread sees the helper.
  slot->job.store(&job);
  ++epoch_;
  epoch_.notify_all();
  job.help();
  slot->job.store(nullptr);
  constexpr std::chrono::microseconds kSpin{200};
  constexpr std::chrono::microseconds kNap{20};
  const Clock::time_point spin_end = Clock::now() + kSpin;
  while (slot->users.load() != 0) {
    if (Clock::now() < spin_end) {
      pause();
    } else {
      std::this_thread::sleep_for(kNap);  // A body that runs on needs the core more, should cores be scarce.
    }
  }
  slot->taken.store(false, std::memory_order_release);
  job.rethrow();
}

bool Team::help_any() noexcept {
  bool helped = false;
  for (Slot& slot : slots_) {
    if (slot.job.load(std::memory_order_relaxed) == nullptr) continue;
    ++slot.users;
    if (Job* const job = slot.job.load(); job != nullptr && !job->exhausted()) helped |= job->help();
    --slot.users;
  }
  return helped;
}

void Team::work(std::uint32_t helper) noexcept {
  if (options_.on_start) options_.on_start(helper);
  for (;;) {
    // The epoch first: a stop that is not seen below raises it afterwards, and the wait at the end returns at once.
    const std::uint32_t epoch = epoch_.load();
    if (stop_.load()) return;
    const Clock::time_point sleep_at = Clock::now() + options_.spin;
    bool helped = help_any();
    while (!helped && epoch_.load(std::memory_order_relaxed) == epoch && Clock::now() < sleep_at) {
      for (int i = 0; i < 16; ++i) pause();
    }
    if (!helped && epoch_.load() == epoch) epoch_.wait(epoch);
  }
}

}  // namespace sluice::cpu
