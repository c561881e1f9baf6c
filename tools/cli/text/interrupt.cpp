#include "tools/cli/text/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <string_view>

namespace sluice::tools {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM};
/// Signals so close to the first one are that one again: `timeout` sends it to its child, and then to the child's
/// group.
constexpr std::int64_t kOnceMs = 250;

/// When the newest scope's first signal came, in milliseconds of the monotonic clock; 0: none has.
std::atomic<std::int64_t> asked_ms{0};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);  // A signal handler may touch nothing else.

std::int64_t now_ms() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000 + 1;
}

void set(int signal, void (*handler)(int)) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if (action.sa_handler == SIG_IGN) return;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

void note(int signal) {
  const std::int64_t now = now_ms();
  std::int64_t first = 0;
  if (!asked_ms.compare_exchange_strong(first, now)) {
    if (now - first < kOnceMs) return;
    set(signal, SIG_DFL);
    ::raise(signal);  // It ends the process behind this handler.
    return;
  }
  constexpr std::string_view kNews =
      "\nsluice: interrupted: what is finished is reported; Ctrl-C or SIGTERM again ends at once\n";
  const int kept = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kNews.data(), kNews.size());
  errno = kept;
}

}  // namespace

InterruptScope::InterruptScope() {
  asked_ms.store(0);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    set(kSignals[i], note);
  }
}

InterruptScope::~InterruptScope() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

bool interrupted() noexcept { return asked_ms.load() != 0; }

void stop_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

}  // namespace sluice::tools
