#include "tests/support/decoder_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace sluice::test {
namespace {

using Steady = std::chrono::steady_clock;

constexpr const char* kForward = "forward";  ///< one has been enqueued
constexpr const char* kDone = "done";        ///< and how many got to their end, and how many did not
constexpr const char* kWrong = "wrong: ";    ///< and what

void say(int report, std::string line) noexcept {
  std::ranges::replace(line, '\n', ' ');
  line += '\n';
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t written = ::write(report, line.data() + at, line.size() - at);
    if (written < 0 && errno != EINTR) return;  // The parent has gone.
    if (written > 0) at += static_cast<std::size_t>(written);
  }
}

bool closed(int stop) noexcept {
  pollfd end{.fd = stop, .events = POLLIN, .revents = 0};
  return ::poll(&end, 1, 0) != 0;
}

}  // namespace

void decode_for_parent(const EngineRig& rig, EngineOptions options, const std::vector<DecodedLine>& lines,
                       DecodingHooks hooks, int stop, int report) noexcept {
  try {
    hooks.enqueued = [report] { say(report, kForward); };
    hooks.again = [stop] { return !closed(stop); };
    const DecodingReport done = decode_lines(rig, options, lines, hooks);
    say(report, kDone + (" " + std::to_string(done.forwards)) + " " + std::to_string(done.failed));
  } catch (const std::exception& error) {
    report_failure(error.what(), report);
  }
}

void report_failure(const std::string& reason, int report) noexcept { say(report, kWrong + reason); }

DecoderProcess::DecoderProcess(const std::function<void(int stop, int report)>& body) {
  int stop[2] = {-1, -1};
  int report[2] = {-1, -1};
  if (::pipe2(stop, O_CLOEXEC) != 0) throw std::runtime_error("no pipe to tell a process to stop");
  if (::pipe2(report, O_CLOEXEC) != 0) throw std::runtime_error("no pipe for what a process says");
  process_ = ::fork();
  if (process_ == 0) {
    ::close(stop[1]);
    ::close(report[0]);
    body(stop[0], report[1]);
    ::_exit(0);
  }
  // With its ends closed here it is seen when the process has ended.
  ::close(stop[0]);
  ::close(report[1]);
  stop_ = stop[1];
  report_ = report[0];
  if (process_ < 0) throw std::runtime_error("no process");
}

DecoderProcess::~DecoderProcess() {
  if (process_ > 0) {
    ::kill(process_, SIGKILL);
    (void)await_exit(Steady::now() + std::chrono::seconds(30));
  }
  for (const int end : {stop_, report_}) {
    if (end >= 0) ::close(end);
  }
}

void DecoderProcess::await_forwards(std::uint64_t count, std::chrono::milliseconds timeout) {
  std::string line;
  while (read_line({}, line)) take(line);  // What was said before.
  const std::uint64_t wanted = forwards_ + count;
  const Time end = Steady::now() + timeout;
  while (forwards_ < wanted) {
    if (done_) throw std::runtime_error("the process has done all it had to, and was not told to stop");
    if (!read_line(end, line))
      throw std::runtime_error("the process has enqueued " + std::to_string(forwards_) + " forwards, and no other in " +
                               std::to_string(timeout.count()) + " ms");
    take(line);
  }
}

void DecoderProcess::suspend(std::chrono::milliseconds span) const {
  ::kill(process_, SIGSTOP);
  std::this_thread::sleep_for(span);
  ::kill(process_, SIGCONT);
}

void DecoderProcess::kill(std::chrono::milliseconds timeout) {
  ::kill(process_, SIGKILL);
  if (!await_exit(Steady::now() + timeout)) throw std::runtime_error("a process that was killed has not gone");
}

DecodingReport DecoderProcess::finish(std::chrono::milliseconds timeout) {
  ::close(std::exchange(stop_, -1));
  const Time end = Steady::now() + timeout;
  std::string line;
  while (!done_) {
    if (!read_line(end, line))
      throw std::runtime_error("the process was told to stop, and has not in " + std::to_string(timeout.count()) +
                               " ms");
    take(line);
  }
  if (!await_exit(end)) throw std::runtime_error("the process has done all it had to, and does not end");
  if (!WIFEXITED(status_) || WEXITSTATUS(status_) != 0)
    throw std::runtime_error("the process has done all it had to, and died, with status " + std::to_string(status_));
  return told_;
}

bool DecoderProcess::read_line(Time end, std::string& line) {
  for (;;) {
    if (const std::size_t size = unread_.find('\n'); size != std::string::npos) {
      line = unread_.substr(0, size);
      unread_.erase(0, size + 1);
      return true;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Steady::now()).count();
    pollfd said{.fd = report_, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&said, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0 && left > 0) continue;
    if (ready <= 0) return false;
    char text[4096];
    const ssize_t size = ::read(report_, text, sizeof text);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) throw std::runtime_error("the process has died");
    unread_.append(text, static_cast<std::size_t>(size));
  }
}

void DecoderProcess::take(const std::string& line) {
  if (line == kForward) {
    ++forwards_;
  } else if (line.starts_with(kDone)) {
    std::istringstream counts(line.substr(std::string(kDone).size()));
    done_ = static_cast<bool>(counts >> told_.forwards >> told_.failed);
    if (!done_) throw std::runtime_error("the process said `" + line + "`");
  } else {
    throw std::runtime_error("the process said `" + line + "`");
  }
}

bool DecoderProcess::await_exit(Time end) noexcept {
  while (process_ > 0) {
    const pid_t gone = ::waitpid(process_, &status_, WNOHANG);
    if (gone == process_ || (gone < 0 && errno != EINTR)) process_ = -1;
    if (process_ > 0 && Steady::now() >= end) return false;
    if (process_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace sluice::test
