#include "runtime/far/answer_watchdog.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>

#include "runtime/far/mailbox.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::runtime {
namespace {

/// Replaces what the gate was closed with, and nothing else.
void open_with(ForwardMailbox& mailbox, std::uint64_t asked, std::uint64_t word) noexcept {
  std::uint64_t closed = ForwardGate::closed(asked);
  (void)std::atomic_ref(mailbox.gate.word).compare_exchange_strong(closed, word, std::memory_order_release);
}

}  // namespace

void open_gate(ForwardMailbox& mailbox, std::uint64_t asked) noexcept {
  open_with(mailbox, asked, ForwardGate::answered(asked));
}

AnswerWatchdog::AnswerWatchdog(ForwardMailbox& mailbox, std::chrono::milliseconds timeout)
    : mailbox_(mailbox), timeout_(timeout) {
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { work(stop); });
  } catch (const std::system_error& error) {
    throw Error(Errc::out_of_capacity, std::string("the system has no thread left to watch answers: ") + error.what() +
                                           "; raise the limit (ulimit -u, pids.max), or use Handover::device");
  }
}

void AnswerWatchdog::wake(std::uint64_t forward) {
  {
    const std::lock_guard lock(mutex_);
    expected_ = forward;
  }
  woken_.notify_one();
}

/// Caller holds mutex_.
bool AnswerWatchdog::under_way() const noexcept { return look(mailbox_.outcome.forward) < expected_; }

void AnswerWatchdog::work(const std::stop_token& stop) {
  // Between two looks, which are reads of RunClock.
  const auto nap = std::clamp<std::chrono::microseconds>(timeout_ / 16, std::chrono::milliseconds(1),
                                                         RunClock::kLongestGap - std::chrono::milliseconds(1));
  std::uint64_t watched = 0;
  Deadline deadline{};
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    woken_.wait(lock, stop, [this] { return under_way(); });
    const std::uint64_t asked = look(mailbox_.question.asked);
    if (asked != watched) {
      watched = asked;
      deadline = deadline_after(timeout_);
    } else if (look(mailbox_.answer.answered) < asked && RunClock::now() >= deadline) {
      open_with(mailbox_, asked, ForwardGate::given_up(asked));
    }
    (void)woken_.wait_for(lock, stop, nap, [] { return false; });
  }
  drain();
}

/// Caller holds mutex_, which nobody else wants any more. Not the newest question alone: others may be still to come.
void AnswerWatchdog::drain() {
  constexpr std::chrono::milliseconds kNap{1};
  for (const Deadline deadline = deadline_after(timeout_); under_way() && RunClock::now() < deadline;) {
    open_with(mailbox_, look(mailbox_.question.asked), ForwardGate::given_up(look(mailbox_.question.asked)));
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace sluice::runtime
