#include "tests/soak/supervisor.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>

#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

int exit_code(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

/// Waits until the process ends, at most for `time`.
std::optional<int> ended_within(pid_t child, milliseconds time) {
  const auto deadline = Clock::now() + time;
  for (;;) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return exit_code(status);
    if (Clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(milliseconds(2));
  }
}

milliseconds up_to(milliseconds most, Random& random) {
  return milliseconds(random.below(static_cast<std::uint32_t>(most.count()) + 1));
}

}  // namespace

Doing& shared_doing() {
  static Doing* const doing = [] {
    void* const memory = ::mmap(nullptr, sizeof(Doing), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot share memory with a process");
    return new (memory) Doing;
  }();
  return *doing;
}

int supervised(const std::function<int()>& work, const Stops& stops) {
  std::fflush(nullptr);  // what is buffered would be written twice
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a stopped process would stay for ever
    const int code = work();
    std::fflush(nullptr);
    ::_exit(code);
  }
  Random random(stops.seed);
  for (;;) {
    const milliseconds gap = stops.every.count() == 0 ? milliseconds(1000) : up_to(2 * stops.every, random);
    const std::optional<int> code = ended_within(child, gap);
    if (code) return *code;
    if (stops.every.count() == 0) continue;
    ::kill(child, SIGSTOP);
    std::this_thread::sleep_for(up_to(stops.longest, random));
    ++shared_doing().stops;
    ::kill(child, SIGCONT);
  }
}

}  // namespace sluice::test
