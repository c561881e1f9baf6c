#include "tools/cli/text/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string_view>

namespace sluice::tools {
namespace {

std::atomic<bool> asked{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // A signal handler may touch nothing else.

void note(int) {
  asked.store(true);
  constexpr std::string_view kNews = "\nsluice: interrupted: what is finished is reported; Ctrl-C again ends at once\n";
  const int kept = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kNews.data(), kNews.size());
  errno = kept;
}

}  // namespace

InterruptScope::InterruptScope() {
  asked.store(false);
  ::sigaction(SIGINT, nullptr, &before_);
  if (before_.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
}

InterruptScope::~InterruptScope() { ::sigaction(SIGINT, &before_, nullptr); }

bool interrupted() noexcept { return asked.load(); }

void stop_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

}  // namespace sluice::tools
