// The limit of a test is one of its work: of processor time, which no other process uses up. The time limit of ctest is
// the wall clock's, and ends only what waits for ever.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string_view>

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr rlim_t kSeconds = 1800;
#else
constexpr rlim_t kSeconds = 600;
#endif

extern "C" void on_work_limit(int signal) {
  constexpr std::string_view kText =
      "this test has used as much processor time as one may (tests/support/work_limit.cpp)\n";
  [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, kText.data(), kText.size());
  (void)std::signal(signal, SIG_DFL);
  (void)std::raise(signal);
}

/// From before main, for whichever cases it runs.
struct WorkLimit {
  WorkLimit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_CPU, &limit) != 0) return;
    limit.rlim_cur = std::min(limit.rlim_max, kSeconds);
    (void)::setrlimit(RLIMIT_CPU, &limit);
    (void)std::signal(SIGXCPU, on_work_limit);
  }
};
const WorkLimit kLimit;

}  // namespace
