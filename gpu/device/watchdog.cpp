#include "gpu/device/watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

using Verdict = FlagWait::Verdict;

/// How often flags are looked at: often enough to be punctual, seldom enough to cost nothing.
constexpr std::chrono::microseconds kShortestPeriod{500};
constexpr std::chrono::microseconds kLongestPeriod{4'000};  // See RunClock::kLongestGap.
/// Rounds without work before the thread sleeps for good. Waking it costs a system call on the enqueuing thread, so
/// it stays awake between the waits of a decode.
constexpr int kIdleRounds = 100;

std::atomic_ref<std::uint64_t> atomic(std::uint64_t* word) noexcept { return std::atomic_ref<std::uint64_t>(*word); }

}  // namespace

std::string reason_of(const FlagWait& wait, std::chrono::milliseconds timeout) {
  const std::string what = "waited for a flag (value " + std::to_string(wait.value) + ") ";
  switch (wait.verdict.load(std::memory_order_acquire)) {
    case Verdict::pending:
    case Verdict::reached: return {};
    case Verdict::failed: return what + "that failed";
    case Verdict::late: return what + "that did not come within " + std::to_string(timeout.count()) + " ms";
    case Verdict::abandoned: return what + "when the stream was destroyed with work in its queue";
    case Verdict::freed: return what + "whose memory was freed before it came";
  }
  return what;
}

Watchdog::Watchdog(std::chrono::milliseconds timeout)
    : timeout_(timeout),
      period_(std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(timeout) / 8, kShortestPeriod,
                         kLongestPeriod)) {
  waits_.reserve(256);
}

void Watchdog::start() {
  if (thread_.joinable()) return;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw Error(Errc::out_of_capacity, std::string("CUDA device: no thread to watch over waits (") + error.what() +
                                           "); raise the limit (ulimit -u, pids.max)");
  }
  (void)::pthread_setname_np(thread_.native_handle(), "sluice-watchdog");
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<FlagWait> Watchdog::watch(const Flag& flag, std::uint64_t value, const FlagWait::Place& place) {
  auto wait = std::make_shared<FlagWait>();
  wait->word = const_cast<Flag&>(flag).word();
  wait->value = value;
  wait->place = place;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    start();
    waits_.push_back(wait);
    wake = std::exchange(asleep_, false);
  }
  if (wake) changed_.notify_one();
  return wait;
}

FlagWait::Verdict Watchdog::look(FlagWait& wait) {
  if (wait.verdict.load(std::memory_order_acquire) == Verdict::pending) {
    const std::lock_guard lock(mutex_);
    settle(wait);
  }
  return wait.verdict.load(std::memory_order_acquire);
}

void Watchdog::dismiss(FlagWait& wait) noexcept {
  const std::lock_guard lock(mutex_);
  wait.verdict = Verdict::abandoned;
  drop_settled();
}

void Watchdog::settle_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& wait : waits_) settle(*wait);
  drop_settled();
}

void Watchdog::abandon(const void* stream) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& wait : waits_) {
    if (wait->place.stream != stream) continue;
    settle(*wait);
    if (wait->verdict == Verdict::pending) release(wait->word, wait->value, Verdict::abandoned);
  }
  drop_settled();
}

void Watchdog::forget(std::span<const std::byte> memory) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& wait : waits_) {
    const auto* const at = reinterpret_cast<const std::byte*>(wait->word);
    if (at < memory.data() || at >= memory.data() + memory.size()) continue;
    settle(*wait);
    if (wait->verdict == Verdict::pending) release(wait->word, wait->value, Verdict::freed);
  }
  drop_settled();
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  int idle_rounds = 0;
  while (!stopping_) {
    if (idle_rounds >= kIdleRounds) {
      asleep_ = true;
      changed_.wait(lock, [this] { return stopping_ || !asleep_; });
      idle_rounds = 0;
    } else {
      (void)changed_.wait_for(lock, period_, [this] { return stopping_; });
    }
    patrol();
    idle_rounds = waits_.empty() ? idle_rounds + 1 : 0;
  }
}

/// The clock of a wait starts when its stream gets there, not when it is enqueued: what is queued before it may take
/// as long as it takes.
void Watchdog::patrol() {
  const Deadline now = RunClock::now();
  for (const auto& wait : waits_) {
    settle(*wait);
    if (wait->verdict != Verdict::pending) continue;
    if (!wait->timed) {
      const std::uint64_t arrived = atomic(const_cast<std::uint64_t*>(wait->place.arrived)).load();
      if (arrived >= wait->place.ticket) {
        wait->timed = true;
        wait->deadline = now + timeout_;
      }
    } else if (now >= wait->deadline) {
      release(wait->word, wait->value, Verdict::late);
    }
  }
  drop_settled();
}

/// Caller holds mutex_, under which verdicts change.
void Watchdog::settle(FlagWait& wait) noexcept {
  if (wait.verdict != Verdict::pending) return;
  const std::uint64_t word = atomic(wait.word).load(std::memory_order_acquire);
  if (word < Flag::reached_word(wait.value)) return;
  wait.verdict = word == Flag::failed_word(wait.value) ? Verdict::failed : Verdict::reached;
}

/// Fails the flag unless its producer is faster. Waits for a lower value are released as well, so they fail too.
/// Caller holds mutex_.
void Watchdog::release(std::uint64_t* word, std::uint64_t value, Verdict verdict) noexcept {
  std::uint64_t seen = atomic(word).load(std::memory_order_acquire);
  while (seen < Flag::reached_word(value)) {
    if (!atomic(word).compare_exchange_weak(seen, Flag::failed_word(value), std::memory_order_acq_rel)) continue;
    for (const auto& wait : waits_) {
      const bool missed = wait->word == word && wait->value <= value && seen < Flag::reached_word(wait->value);
      if (missed && wait->verdict == Verdict::pending) wait->verdict = verdict;
    }
    return;
  }
  for (const auto& wait : waits_) {
    if (wait->word == word) settle(*wait);
  }
}

void Watchdog::drop_settled() noexcept {
  std::erase_if(waits_, [](const auto& wait) { return wait->verdict != Verdict::pending; });
}

}  // namespace sluice::gpu
