// An engine in a control group that grants less CPU time than the machine has: as many threads as it grants, and none
// that spins while nothing is planned. Makes a group of its own below this process's, runs a process in it, and removes
// it. Where that is not permitted it says why and returns 77, which ctest reports as skipped.

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/core_shares.hpp"
#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"
#include "tests/support/engine_rig.hpp"

namespace sluice::test {

namespace {

using namespace std::chrono_literals;
using std::filesystem::path;

constexpr int kSkipped = 77;
constexpr std::uint64_t kPeriodUs = 100'000;
constexpr std::chrono::seconds kPatience{600};

bool write(const path& file, const std::string& text) {
  const int to = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  if (to < 0) return false;
  const bool done = ::write(to, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(to);
  return done;
}

bool lists(const path& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string each; in >> each;)
    if (each == word) return true;
  return false;
}

/// Where this process is in the hierarchy of a controller; of version 2 that has no name.
std::string own_group(const std::string& controller) {
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::istringstream names(line.substr(first + 1, second - first - 1));
    std::string name;
    do {
      name.clear();
      std::getline(names, name, ',');
      if (name == controller) return line.substr(second + 1);
    } while (names.good());
  }
  return "/";
}

/// A group of its own that grants `cpus` CPUs of time, until it goes.
class Group {
 public:
  explicit Group(std::uint64_t cpus) : cpus_(cpus) {
    if (!make_v2() && !make_v1()) reason_ += "no control group can be made here, or none with a limit on CPU time";
  }
  ~Group() {
    if (directory_.empty()) return;
    // The kernel lets go of a process a little after it was waited for.
    for (int i = 0; i < 500 && ::rmdir(directory_.c_str()) != 0; ++i) std::this_thread::sleep_for(10ms);
    if (!enabled_.empty()) (void)write(enabled_, "-cpu");
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] bool made() const noexcept { return !directory_.empty(); }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] const path& directory() const noexcept { return directory_; }

 private:
  /// Below this process's group or, as groups with processes may not have others that are limited, one above it.
  bool make_v2() {
    const path root = "/sys/fs/cgroup";
    if (!std::filesystem::exists(root / "cgroup.controllers")) return false;
    for (path at = root / path(own_group("")).relative_path();; at = at.parent_path()) {
      const path control = at / "cgroup.subtree_control";
      const bool enables = lists(at / "cgroup.controllers", "cpu") && !lists(control, "cpu") && write(control, "+cpu");
      if (lists(control, "cpu") && make(at, [this](const path& group) {
            return write(group / "cpu.max", std::to_string(cpus_ * kPeriodUs) + " " + std::to_string(kPeriodUs));
          })) {
        if (enables) enabled_ = control;
        return true;
      }
      if (enables) (void)write(control, "-cpu");
      if (at == root || !at.has_relative_path() || at == at.parent_path()) return false;
    }
  }
  bool make_v1() {
    const path above = path("/sys/fs/cgroup/cpu") / path(own_group("cpu")).relative_path();
    return make(above, [this](const path& group) {
      return write(group / "cpu.cfs_period_us", std::to_string(kPeriodUs)) &&
             write(group / "cpu.cfs_quota_us", std::to_string(cpus_ * kPeriodUs));
    });
  }
  template <class Limit>
  bool make(const path& above, const Limit& limit) {
    const path group = above / ("sluice-test-" + std::to_string(::getpid()) + "-" + std::to_string(cpus_));
    if (::mkdir(group.c_str(), 0755) != 0) return false;
    if (!limit(group)) {
      (void)::rmdir(group.c_str());
      return false;
    }
    directory_ = group;
    return true;
  }

  std::uint64_t cpus_;
  path directory_;
  path enabled_;  ///< the file in which the controller was switched on for it
  std::string reason_;
};

std::uint64_t cpu_time_us() {
  rusage used{};
  (void)::getrusage(RUSAGE_SELF, &used);
  const auto us = [](const timeval& time) {
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000 + static_cast<std::uint64_t>(time.tv_usec);
  };
  return us(used.ru_utime) + us(used.ru_stime);
}

std::uint64_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::uint64_t>(std::distance(begin(tasks), end(tasks)));
}

/// A thread that spins takes a share of a core even on a busy machine; those that sleep take nothing.
std::string require_rest(const char* when) {
  constexpr std::uint64_t kMostUs = 30'000;
  std::this_thread::sleep_for(100ms);
  const std::uint64_t before = cpu_time_us();
  std::this_thread::sleep_for(600ms);
  const std::uint64_t used = cpu_time_us() - before;
  if (used <= kMostUs) return {};
  return std::string("threads took ") + std::to_string(used) + " us of CPU time in 600 ms " + when;
}

/// Decodes in a process that is granted `cpus`. Empty, or what went wrong.
std::string decode(std::uint64_t cpus) {
  constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};
  const auto differs = [](const char* what, std::uint64_t is, std::uint64_t most) {
    return std::to_string(is) + " " + what + ", where the control group grants " + std::to_string(most);
  };
  if (cpu::cpu_quota() != cpus) return differs("CPUs are seen", cpu::cpu_quota(), cpus);
  const cpu::Topology machine;
  if (machine.cores() > cpus) return differs("cores are used", machine.cores(), cpus);
  const auto workers = std::make_shared<cpu::Workers>(machine, cpu::WorkersOptions{});
  if (workers->threads() > cpus) return differs("threads run verbs", workers->threads(), cpus);
  EngineRig rig{.device = std::make_shared<cpu::HostDevice>(workers), .queue = nullptr};
  rig.queue = rig.device->create_stream("caller");
  rig.stream = rig.queue.get();
  const PolicySpec policy = parse_policy("exact | int4 | top_k=all | near=0,sinks=2,recent=6");
  EngineOptions options{.shape = kShape, .kv_dtype = DType::f32, .policies = {policy}, .largest = {.decode_rows = 1}};
  options.host_bytes = 20 * block_bytes(options);
  const std::uint64_t before = threads_of_process();
  Engine engine(options, rig.device);
  const std::uint64_t answering = threads_of_process() - before;
  if (answering > cpus) return differs("threads answer", answering, cpus);
  if (cpu::CoreShares::of_process().shares().at(0).cores > cpus) return "the engine's share of cores exceeds the grant";
  if (std::string wrong = require_rest("before the first plan"); !wrong.empty()) return wrong;

  const Story story(kShape, 140, 3);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, 120, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const std::vector<float> out = run_forward(engine, rig, tensors, {&teller})[0];
    const std::vector<double> want = story.attended(0, teller.at - 1, teller.at, 1, 0);
    for (std::size_t i = 0; i < want.size(); ++i)
      if (!(std::abs(want[i] - out[i]) < 1e-4)) return "decoded outputs are off";
  }
  return require_rest("after the last forward");
}

/// What a process in the group says, which is waited for.
std::string run_in(const Group& group, std::uint64_t cpus) {
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    std::string wrong;
    try {
      wrong = write(group.directory() / "cgroup.procs", "0") ? decode(cpus) : "skipped: a process may not enter it";
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    (void)!::write(report[1], wrong.data(), wrong.size());
    ::_exit(0);
  }
  ::close(report[1]);
  if (child < 0) return "no process";
  std::string said;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (char text[256];;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd ready{.fd = report[0], .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0))) <= 0) {
      said = "the process in the group did not come to an end";
      (void)::kill(child, SIGKILL);
      break;
    }
    const ssize_t count = ::read(report[0], text, sizeof text);
    if (count <= 0) break;
    said.append(text, static_cast<std::size_t>(count));
  }
  ::close(report[0]);
  int status = 0;
  (void)::waitpid(child, &status, 0);
  if (said.empty() && (!WIFEXITED(status) || WEXITSTATUS(status) != 0)) return "the process in the group has crashed";
  return said;
}

int run() {
  for (const std::uint64_t cpus : {1, 2}) {
    const Group group(cpus);
    const std::string said = group.made() ? run_in(group, cpus) : "skipped: " + group.reason();
    if (said.empty()) continue;
    std::fprintf(stderr, "%llu CPUs: %s\n", static_cast<unsigned long long>(cpus), said.c_str());
    return said.rfind("skipped", 0) == 0 ? kSkipped : 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice::test

int main() { return sluice::test::run(); }
