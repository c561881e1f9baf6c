#include "tools/cli/text/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string_view>

namespace sluice::tools {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM};
std::atomic<bool> asked{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // A signal handler may touch nothing else.

void set(int signal, void (*handler)(int)) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if (action.sa_handler == SIG_IGN) return;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

void note(int) {
  asked.store(true);
  constexpr std::string_view kNews = "\nsluice: interrupted: what is finished is reported; Ctrl-C again ends at once\n";
  const int kept = errno;
  for (const int signal : kSignals) set(signal, SIG_DFL);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kNews.data(), kNews.size());
  errno = kept;
}

}  // namespace

InterruptScope::InterruptScope() {
  asked.store(false);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    set(kSignals[i], note);
  }
}

InterruptScope::~InterruptScope() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

bool interrupted() noexcept { return asked.load(); }

void stop_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

}  // namespace sluice::tools
