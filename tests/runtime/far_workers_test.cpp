// Threads that answer questions, as far as they sleep, share cores and wait for one another.
#include "runtime/far/far_workers.hpp"

#include <sched.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include "runtime/far/far_choice.hpp"
#include "sluice/error.hpp"
#include "tests/runtime/comes.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/no_threads.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

/// What threads look at that are asked nothing.
struct Desk {
  Desk() {
    memory.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 32};
    memory.layout = {.page_tokens = 16, .head_dim = 32, .dtype = DType::f32};
    memory.largest.decode_rows = 1;
    memory.mailbox = &mailbox;
  }
  FarWorkers workers(cpu::CoreShares& shares, const std::string& machine, const FarWorkersOptions& options) {
    return workers(shares, cpu::Topology(machine), options);
  }
  FarWorkers workers(cpu::CoreShares& shares, const cpu::Topology& machine, const FarWorkersOptions& options) {
    return {memory, choice, notes, options, shares.take({.topology = machine})};
  }
  void end(std::uint64_t forward) { std::atomic_ref(mailbox.outcome.forward).store(forward); }

  ForwardMailbox mailbox{};
  ForwardMemory memory;
  FarChoice choice{memory, cpu::fastest_kernels(), 1s};
  FarNotes notes{memory};
};

/// With a row whose policy chooses in the first forward.
struct ChoosingDesk : Desk {
  ChoosingDesk() { choice.expect(1, 0, {{.sequence = SequenceId{1}, .policy = policy, .index = 0, .window = {}}}); }

  cpu::Topology machine;
  std::vector<std::uint32_t> blocks{0};
  std::shared_ptr<SequencePolicy> policy =
      std::make_shared<SequencePolicy>(parse_policy("exact | top_k=4 | near=0"), memory, blocks);
};

/// Threads that do nothing: on a busy machine some may stand aside, whose cores others take.
std::uint32_t resting(const FarWorkers& workers) { return workers.asleep() + workers.aside(); }

/// Threads of this process that may run on that PU alone.
std::size_t threads_bound_to(std::uint32_t pu) {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    cpu_set_t set;
    if (sched_getaffinity(std::stoi(task.path().filename()), sizeof set, &set) != 0) continue;  // It has ended.
    count += CPU_COUNT(&set) == 1 && CPU_ISSET(pu, &set) ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST_CASE("threads sleep between plans, all of them", "[far_workers]") {
  Desk desk;
  cpu::CoreShares shares;
  FarWorkers workers = desk.workers(shares, "core:4 pu:2", {.threads = 3, .pin = false});
  for (std::uint64_t forward = 1; forward < 20; ++forward) {
    REQUIRE(comes([&] { return resting(workers) == 3; }));
    workers.wake(forward);
    REQUIRE(comes([&] { return workers.asleep() == 0; }));
    std::this_thread::sleep_for(3ms);
    REQUIRE(workers.asleep() == 0);
    desk.end(forward);
  }
  REQUIRE(comes([&] { return resting(workers) == 3; }));
  const std::uint64_t before = workers.stirrings();
  std::this_thread::sleep_for(200ms);
  REQUIRE(resting(workers) == 3);
  REQUIRE(workers.stirrings() <= before + 3);  // A signal may stir them; whoever polls would be seen hundreds of times.
}

TEST_CASE("threads go by the share of cores when a forward is planned", "[far_workers]") {
  Desk desk;
  cpu::CoreShares shares;
  const cpu::Topology machine("numa:2 core:4 pu:2");
  FarWorkers workers = desk.workers(shares, machine, {.spare = 1, .pin = false});
  REQUIRE(workers.active() == 7);
  REQUIRE(workers.spins());
  std::optional<cpu::CoreShares::Lease> other(shares.take({.topology = machine}));
  REQUIRE(workers.active() == 7);
  workers.wake(1);
  REQUIRE(workers.active() == 3);
  REQUIRE(workers.spins());
  REQUIRE(comes([&] { return workers.asleep() == 4; }));
  std::optional<cpu::CoreShares::Lease> third(
      shares.take({.topology = machine.of_pus(std::vector<std::uint32_t>{0, 2, 4, 6}), .named = true}));
  workers.wake(2);
  REQUIRE(workers.active() == 1);
  REQUIRE(comes([&] { return workers.asleep() == 6 && workers.aside() == 0; }));
  other.reset();
  third.reset();
  workers.wake(3);
  REQUIRE(workers.active() == 7);
  REQUIRE(comes([&] { return workers.asleep() == 0; }));
  desk.end(3);
  REQUIRE(comes([&] { return resting(workers) == 7; }));
}

TEST_CASE("threads leave the core on which the caller runs, wherever that is", "[far_workers]") {
  const cpu::Topology machine;
  const std::vector<std::uint32_t> cores = machine.core_order(0);
  const auto threads = static_cast<std::uint32_t>(cores.size()) - 1;
  if (threads == 0) return;  // One core, which all share.
  Desk desk;
  cpu::CoreShares shares;
  FarWorkers workers = desk.workers(shares, machine, {.threads = threads});
  std::thread([&] {  // What this test's thread may use stays.
    for (std::uint64_t forward = 1; forward <= 3 * cores.size(); ++forward) {
      const std::uint32_t pu = cores[forward % cores.size()];
      if (!machine.bind_this_thread(pu)) return;
      CHECK(comes([&] { return resting(workers) == threads; }));
      workers.wake(forward);
      CHECK(workers.caller_place() == pu);
      CHECK(comes([&] { return workers.asleep() == 0; }));
      CHECK(threads_bound_to(pu) == 1);  // This one.
      desk.end(forward);
    }
  }).join();
}

TEST_CASE("threads leave the caller's core, too, on their way to where they were sent before", "[far_workers]") {
  const cpu::Topology machine;
  const auto cores = machine.core_order(0);
  const auto threads = static_cast<std::uint32_t>(cores.size()) - 1;
  if (threads == 0) return;  // One core, which all share.
  Desk desk;
  cpu::CoreShares shares;
  FarWorkers workers = desk.workers(shares, machine, {.threads = threads});
  // One run of ten or so finds a thread there, on a busy machine.
  std::thread([&] {
    std::uint64_t forward = 0;
    bool right = true;
    for (std::uint32_t round = 0; right && round < 1'000; ++round) {
      std::uint32_t pu = 0;
      for (std::uint32_t i = 0; i < 2 + round % 3; ++i) {
        pu = cores[(round + i) % cores.size()];
        if (!machine.bind_this_thread(pu)) return;
        workers.wake(++forward);
      }
      CAPTURE(round);
      CHECK((right = comes([&] { return workers.asleep() == 0 && threads_bound_to(pu) == 1; })));
      desk.end(forward);
      CHECK(comes([&] { return resting(workers) == threads; }));
    }
  }).join();
}

TEST_CASE("half of the threads stand aside where others take their cores, and come back where fewer are left",
          "[far_workers][presence]") {
  Desk desk;
  cpu::CoreShares shares;
  const cpu::Topology machine("core:8 pu:2");
  std::atomic<std::uint64_t> taken{0};
  std::atomic<bool> busy{true};
  const auto times_taken = [&] { return busy ? ++taken : taken.load(); };  // Once more, or twice, at every look.
  FarWorkers workers = desk.workers(shares, machine, {.spare = 1, .pin = false, .times_taken = times_taken});
  REQUIRE(workers.active() == 7);
  std::uint64_t forward = 0;
  const auto next_forward = [&] {
    desk.end(forward);
    REQUIRE(comes([&] { return resting(workers) == 7; }));
    workers.wake(++forward);
  };
  // Who does not spin does not look, and a forward that asks nothing is not waited for in that way for long.
  REQUIRE(comes([&] {
    next_forward();
    std::this_thread::sleep_for(5ms);
    return workers.aside() == 3;
  }));
  REQUIRE(comes([&] { return workers.asleep() == 0; }));
  std::this_thread::sleep_for(3 * Presence::kFirstPause);  // None passes its probation.
  REQUIRE(workers.aside() == 3);

  std::optional<cpu::CoreShares::Lease> other(
      shares.take({.topology = machine.of_pus(std::vector<std::uint32_t>{0, 2, 4, 6, 8, 10}), .named = true}));
  next_forward();
  REQUIRE(workers.active() == 1);
  REQUIRE(comes([&] { return workers.asleep() == 6 && workers.aside() == 0; }));  // The one that is left answers.

  busy = false;
  other.reset();
  workers.wake(++forward);
  REQUIRE(workers.active() == 7);
  REQUIRE(comes([&] { return workers.asleep() == 0; }));
  desk.end(forward);
  REQUIRE(comes([&] { return resting(workers) == 7; }));
}

TEST_CASE("with three cores or fewer nothing spins, nor where threads have no core each", "[far_workers]") {
  Desk desk;
  struct Case {
    cpu::Topology machine;
    FarWorkersOptions options;
    std::uint32_t active;
    bool spins;
  };
  const cpu::Topology eight("core:8 pu:1");
  for (const Case& each : {Case{cpu::Topology("core:1 pu:1"), {.spare = 1}, 1, false},
                           Case{cpu::Topology("core:2 pu:2"), {.spare = 1}, 1, false},
                           Case{cpu::Topology("core:3 pu:1"), {.spare = 1}, 2, false},
                           Case{cpu::Topology("core:4 pu:1"), {.spare = 1}, 3, true},
                           Case{cpu::Topology("core:4 pu:1"), {}, 4, false},
                           Case{cpu::Topology("core:4 pu:1"), {.threads = 3}, 3, true},
                           Case{cpu::Topology("core:4 pu:1"), {.threads = 5}, 5, false},
                           Case{eight.limited(2), {.spare = 1}, 1, false},
                           Case{eight.limited(2), {.threads = 1}, 1, false},
                           Case{eight.limited(3), {.spare = 1}, 2, false},
                           Case{eight.limited(4), {.spare = 1}, 3, true}}) {
    cpu::CoreShares shares;
    FarWorkersOptions options = each.options;
    options.pin = false;
    FarWorkers workers = desk.workers(shares, each.machine, options);
    CAPTURE(each.machine.summary(), each.machine.cores(), options.threads, options.spare);
    REQUIRE(workers.active() == each.active);
    REQUIRE(workers.spins() == each.spins);
    REQUIRE(comes([&] { return resting(workers) == each.active; }));
  }
}

TEST_CASE("threads work for jobs, but never all that answer, and then sleep", "[far_workers][job]") {
  struct Case {
    std::uint32_t threads;
    bool under_way;
    int working;
  };
  for (const Case& each : {Case{1, false, 1}, Case{1, true, 1}, Case{2, false, 2}, Case{2, true, 2}, Case{5, false, 5},
                           Case{5, true, 3}}) {
    CAPTURE(each.threads, each.under_way);
    Desk desk;
    cpu::CoreShares shares;
    // Nothing spins, so none stands aside, however busy the machine.
    FarWorkers workers = desk.workers(shares, "core:2 pu:1", {.threads = each.threads, .pin = false, .jobs = true});
    REQUIRE(comes([&] { return resting(workers) == each.threads; }));
    if (each.under_way) workers.wake(1);
    std::atomic<int> working{0};
    std::atomic<bool> open{false};
    const auto job = std::make_shared<Job>(100, [&](std::uint32_t) {
      ++working;
      while (!open) std::this_thread::sleep_for(1ms);
      --working;
    });
    workers.begin(job);
    REQUIRE(comes([&] { return working == each.working; }));
    std::this_thread::sleep_for(20ms);
    REQUIRE(working == each.working);
    open = true;
    REQUIRE(comes([&] { return job->idle(); }));  // Without help.
    desk.end(1);
    REQUIRE(comes([&] { return resting(workers) == each.threads; }));
    const std::uint64_t before = workers.stirrings();
    std::this_thread::sleep_for(50ms);
    REQUIRE(workers.stirrings() <= before + each.threads);
  }
}

TEST_CASE("who needs threads not to learn gets there, however many come and go", "[far_workers]") {
  ChoosingDesk desk;
  std::atomic<bool> done{false};
  std::vector<std::jthread> learners;
  for (int i = 0; i < 8; ++i) {
    learners.emplace_back([&] {
      while (!done) (void)desk.choice.learn(1, [] { return false; });
    });
  }
  for (int i = 0; i < 50; ++i) {
    const Rest rest = desk.choice.rest(60s);
    REQUIRE_FALSE(desk.choice.learn(1, [] { return false; }));
  }
  done = true;
}

TEST_CASE("who needs threads not to learn waits for them, though not for ever", "[far_workers]") {
  ChoosingDesk desk;
  std::atomic<bool> begun{false};
  std::atomic<bool> open{false};
  std::thread learner([&] {
    (void)desk.choice.learn(1, [&] {
      begun = true;
      while (!open) std::this_thread::sleep_for(1ms);
      return false;
    });
  });
  while (!begun) std::this_thread::yield();
  for (int i = 0; i < 2; ++i) REQUIRE(code_of([&] { (void)desk.choice.rest(10ms); }) == Errc::timeout);
  REQUIRE(desk.choice.learn(1, [] { return false; }));  // Who gave up keeps nobody from it.
  open = true;
  {
    const Rest rest = desk.choice.rest(60s);
    learner.join();
    REQUIRE_FALSE(desk.choice.learn(1, [] { return false; }));
  }
  REQUIRE(desk.choice.learn(1, [] { return false; }));
}

TEST_CASE("where there are no threads to be had workers are out of capacity", "[far_workers]") {
  Desk desk;
  cpu::CoreShares shares;
  const NoThreads none;
  const FarWorkersOptions options{.threads = 3, .pin = false};
  REQUIRE(code_of([&] { return desk.workers(shares, "core:4 pu:2", options).active(); }) == Errc::out_of_capacity);
}
