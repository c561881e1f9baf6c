#include "tests/fuzz/finding.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "tests/fuzz/fuzz.hpp"

/// Absent without a sanitizer.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace sluice::test {
namespace {

constexpr int kSeconds = 60;
constexpr rlim_t kMemoryBytes = rlim_t{4} << 30;

/// The input that is running. Plain, because signal handlers read it.
struct Running {
  const char* data = nullptr;
  std::size_t size = 0;
  const char* file = nullptr;
};
volatile bool g_running = false;
Running g_input;

void say(const char* text) { [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, text, std::strlen(text)); }

/// Only calls that a signal handler may make.
void save() {
  if (!g_running) return;
  g_running = false;
  const int fd = ::open(g_input.file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return say("fuzz: a finding, and its file cannot be written\n");
  for (std::size_t done = 0; done < g_input.size;) {
    const ssize_t written = ::write(fd, g_input.data + done, g_input.size - done);
    if (written <= 0) break;
    done += static_cast<std::size_t>(written);
  }
  ::close(fd);
  say("fuzz: finding: ");
  say(g_input.file);
  say("\n");
}

extern "C" void on_signal(int signal) {
  if (signal == SIGPROF) say("fuzz: 60 s of processor time for one input\n");
  save();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void handle(int signal) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

FindingWriter::FindingWriter() {
  // A stack of its own, as a finding may be one that has used up the other.
  static std::vector<char> alternate(1 << 16);
  stack_t stack{};
  stack.ss_sp = alternate.data();
  stack.ss_size = alternate.size();
  ::sigaltstack(&stack, nullptr);
  handle(SIGABRT);
  handle(SIGPROF);
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(save);  // it reports the other signals itself, and needs all address space
    return;
  }
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) handle(signal);
  const rlimit memory{kMemoryBytes, kMemoryBytes};
  ::setrlimit(RLIMIT_AS, &memory);
}

void FindingWriter::run(std::string_view input, const std::string& file) {
  g_input = {.data = input.data(), .size = input.size(), .file = file.c_str()};
  g_running = true;
  const itimerval limit{.it_interval = {}, .it_value = {.tv_sec = kSeconds, .tv_usec = 0}};
  ::setitimer(ITIMER_PROF, &limit, nullptr);
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  g_running = false;
}

}  // namespace sluice::test
