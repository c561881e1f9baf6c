// Ctrl-C: what is finished is reported, and a second one ends the process at once. Standard error is a terminal here,
// whose progress bar says how far the process is.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

/// The command with its standard error on a terminal of ours and its standard output in a file.
class Spawned {
 public:
  Spawned(std::vector<std::string> words, const std::string& out) {
    terminal_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal_ < 0 || ::grantpt(terminal_) != 0 || ::unlockpt(terminal_) != 0)
      throw std::runtime_error("no terminal");
    const std::string name = ::ptsname(terminal_);
    words.insert(words.begin(), sluice::test::cli_path());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    process_ = ::fork();
    if (process_ == 0) {
      for (const int each : {SIGINT, SIGTERM}) ::signal(each, SIG_DFL);  // Who started the tests may have them ignored.
      ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      ::dup2(::open(name.c_str(), O_WRONLY | O_NOCTTY), STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
  }
  ~Spawned() {
    if (process_ > 0 && !ended_) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, nullptr, 0);
    }
    ::close(terminal_);
  }
  Spawned(const Spawned&) = delete;
  Spawned& operator=(const Spawned&) = delete;

  /// Reads the terminal until it shows `text`; false if the process ended before.
  bool shows(const std::string& text) {
    while (!contains(seen_, text)) {
      char bytes[512];
      const ssize_t count = ::read(terminal_, bytes, sizeof bytes);
      if (count <= 0) return false;
      seen_.append(bytes, static_cast<std::size_t>(count));
    }
    return true;
  }
  void interrupt(int signal = SIGINT) const { ::kill(process_, signal); }
  /// The wait status.
  int wait() {
    while (shows("\x01 never written")) continue;  // Drains the terminal, so that nobody blocks on it.
    int status = 0;
    ::waitpid(process_, &status, 0);
    ended_ = true;
    return status;
  }
  [[nodiscard]] const std::string& seen() const noexcept { return seen_; }

 private:
  int terminal_ = -1;
  pid_t process_ = -1;
  bool ended_ = false;
  std::string seen_;
};

const std::string kModel = sluice::test::test_data() + "/testbed";

/// The command on a file of `tasks` under two policies.
std::vector<std::string> eval_of(const TemporaryDirectory& scratch, const std::string& tasks,
                                 const std::vector<std::string>& more = {}) {
  std::vector<std::string> words = {"eval", "--model", kModel, "--tasks", scratch.write("tasks.jsonl", tasks)};
  for (const char* const word : {"--policies", "full;streaming", "--audit", "0", "--decode-prompt", "1", "--max-tokens",
                                 "1", "--threads", "2", "-o", "json"})
    words.emplace_back(word);
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::string task(std::size_t tokens) {
  return R"({"task": "sky", "prompt": ")" + std::string(tokens, 's') + R"(", "answer": "blue"})" + "\n";
}

/// As many short tasks as eval reads before it answers any, then one of many minutes.
std::string long_tasks() {
  std::string tasks;
  for (int i = 0; i < 16; ++i) tasks += task(6);
  return tasks + task(30'000);
}

/// What it shows when the short ones are done.
constexpr const char* kShortDone = "32/34 reads sky 32768";

}  // namespace

TEST_CASE("Ctrl-C in eval, or SIGTERM, reports the tasks that are finished and exits with 130", "[cli]") {
  const int signal = GENERATE(SIGINT, SIGTERM);
  const TemporaryDirectory scratch;
  Spawned eval(eval_of(scratch, long_tasks()), scratch.file("out"));
  REQUIRE(eval.shows(kShortDone));
  eval.interrupt(signal);
  const int status = eval.wait();
  CAPTURE(eval.seen());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 130);
  CHECK(contains(eval.seen(), "interrupted"));
  const json report = json::parse(read_file(scratch.file("out")));
  CHECK(report.at("interrupted") == true);
  CHECK(report.at("tasks").at("items").size() == 16);
  const json rows = report.at("tasks").at("results");
  REQUIRE(rows.size() == 2);
  for (const json& row : rows) {
    CHECK(row.at("length") == 8);
    CHECK(row.at("prompts") == 16);
  }
}

TEST_CASE("Ctrl-C before anything is finished leaves an older result as it was", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string result = scratch.write("result.json", "of another run");
  Spawned eval(eval_of(scratch, task(30'000), {"--output", result}), scratch.file("out"));
  REQUIRE(eval.shows("reads sky"));
  eval.interrupt();
  const int status = eval.wait();
  CAPTURE(eval.seen());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 130);
  CHECK(contains(eval.seen(), "nothing was finished"));
  CHECK(read_file(result) == "of another run");
}

TEST_CASE("a signal that comes twice at once, as timeout sends it, is one", "[cli]") {
  const TemporaryDirectory scratch;
  Spawned eval(eval_of(scratch, long_tasks()), scratch.file("out"));
  REQUIRE(eval.shows(kShortDone));
  eval.interrupt(SIGTERM);
  eval.interrupt(SIGTERM);
  const int status = eval.wait();
  CAPTURE(eval.seen());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 130);
  CHECK(json::parse(read_file(scratch.file("out"))).at("interrupted") == true);
}

TEST_CASE("a second Ctrl-C or SIGTERM ends the process at once", "[cli]") {
  const int first = GENERATE(SIGINT, SIGTERM);
  const int second = GENERATE(SIGINT, SIGTERM);
  CAPTURE(first, second);
  const TemporaryDirectory scratch;
  const std::string pipe = scratch.file("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  // Nobody reads the pipe, so that the report of the first Ctrl-C is never written.
  Spawned eval(eval_of(scratch, long_tasks(), {"--output", pipe}), scratch.file("out"));
  REQUIRE(eval.shows(kShortDone));
  eval.interrupt(first);
  REQUIRE(eval.shows("interrupted"));
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  eval.interrupt(second);
  const int status = eval.wait();
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == second);
}

TEST_CASE("Ctrl-C in a benchmark reports the lengths that are finished", "[cli]") {
  const TemporaryDirectory scratch;
  Spawned bench({"bench", "cpu", "--shape", "testbed", "--length", "1K,32K", "--steps", "16", "--sections", "attention",
                 "-o", "json"},
                scratch.file("out"));
  REQUIRE(bench.shows("1/1 1024 tokens"));
  bench.interrupt();
  const int status = bench.wait();
  CAPTURE(bench.seen());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 130);
  const json report = json::parse(read_file(scratch.file("out")));
  CHECK(report.at("interrupted") == true);
  const json rows = report.at("results").at("attention");
  REQUIRE(rows.size() == 3);
  for (const json& row : rows) CHECK(row.at("length_tokens") == 1024);
}
