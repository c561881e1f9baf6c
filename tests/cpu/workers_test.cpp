#include "cpu/threads/workers.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;

namespace {

WorkersOptions threads(std::uint32_t count) { return {.threads = count}; }

/// How often each of [0, count) was visited. Plain integers: a second visitor or a missing
/// happens-before shows under the thread sanitizer.
std::vector<int> visits(const Workers& workers, std::uint32_t count) {
  std::vector<int> seen(count, 0);
  workers.parallel_for(count, [&](std::uint32_t i) { ++seen[i]; });
  return seen;
}

bool all_ones(const std::vector<int>& seen) {
  return std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; });
}

/// A call of which one body, on a worker, does not return until it is told to. Destroy it last.
class StuckCall {
 public:
  ~StuckCall() {
    gate_->open = true;
    while (gate_->waiting != 0) std::this_thread::yield();
  }

  /// The error of parallel_for; empty if there was none.
  std::string run(const Workers& workers, bool caller_throws = false) {
    const auto caller = std::this_thread::get_id();
    try {
      workers.parallel_for(workers.threads(), [gate = gate_, caller, caller_throws](std::uint32_t) {
        if (std::this_thread::get_id() == caller) {
          while (gate->waiting == 0) std::this_thread::yield();
          if (caller_throws) throw std::runtime_error("the caller's own");
          return;
        }
        const std::shared_ptr<Gate> own = gate;  // What the lambda holds is gone when this body goes on.
        ++own->waiting;
        while (!own->open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        --own->waiting;
      });
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::timeout);
      return error.what();
    }
    return {};
  }
  void end() { gate_->open = true; }
  [[nodiscard]] int waiting() const { return gate_->waiting; }

 private:
  struct Gate {
    std::atomic<bool> open{false};
    std::atomic<int> waiting{0};
  };
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

WorkersOptions impatient(std::uint32_t count) {
  return {.threads = count, .pin = false, .timeout = std::chrono::milliseconds(50)};
}

Errc code_of_call(const Workers& workers, std::uint32_t count) {
  try {
    workers.parallel_for(count, [](std::uint32_t) {});
  } catch (const Error& error) {
    return error.code();
  }
  FAIL("nothing was thrown");
  return {};
}

}  // namespace

TEST_CASE("the number of threads is the asked one or that of the cores", "[workers]") {
  REQUIRE(Workers(Topology("core:6 pu:2"), {}).threads() == 6);
  REQUIRE(Workers(Topology("core:6 pu:2"), threads(3)).threads() == 3);
  REQUIRE(Workers(Topology(), {}).threads() == Topology().cores());
  REQUIRE_THROWS_AS(Workers(Topology(), threads(1'000'000)), Error);
}

TEST_CASE("parallel_for runs every index exactly once", "[workers]") {
  const auto count = GENERATE(0u, 1u, 2u, 3u, 64u, 10'000u);
  const auto thread_count = GENERATE(1u, 2u, 3u, 8u);
  CAPTURE(count, thread_count);
  const Topology topology;
  const Workers workers(topology, threads(thread_count));
  for (int round = 0; round < 20; ++round) REQUIRE(all_ones(visits(workers, count)));
}

TEST_CASE("what bodies wrote is seen by the caller and by later bodies", "[workers]") {
  const Topology topology;
  const Workers workers(topology, threads(4));
  std::vector<std::uint64_t> values(257, 1);
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t before = std::accumulate(values.begin(), values.end(), std::uint64_t{0});
    workers.parallel_for(257, [&](std::uint32_t i) { values[256 - i] += 1; });
    REQUIRE(std::accumulate(values.begin(), values.end(), std::uint64_t{0}) == before + values.size());
  }
}

TEST_CASE("one item and one thread run on the caller, in order", "[workers]") {
  const Topology topology;
  const auto self = std::this_thread::get_id();
  std::vector<std::uint32_t> order;
  Workers(topology, threads(1)).parallel_for(5, [&](std::uint32_t i) {
    if (std::this_thread::get_id() == self) order.push_back(i);
  });
  REQUIRE(order == std::vector<std::uint32_t>{0, 1, 2, 3, 4});
  std::thread::id ran;
  Workers(topology, threads(4)).parallel_for(1, [&](std::uint32_t) { ran = std::this_thread::get_id(); });
  REQUIRE(ran == self);
}

TEST_CASE("more threads than cores do work at the same time", "[workers]") {
  // Each body waits until all have begun: fewer than `kThreads` threads would run into the deadline.
  constexpr std::uint32_t kThreads = 5;
  const Topology topology;
  const Workers workers(topology, threads(kThreads));
  std::atomic<std::uint32_t> begun{0};
  std::atomic<bool> met{true};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  workers.parallel_for(kThreads, [&](std::uint32_t) {
    ++begun;
    while (begun < kThreads) {
      if (std::chrono::steady_clock::now() > deadline) {
        met = false;
        return;
      }
      std::this_thread::yield();
    }
  });
  REQUIRE(met);
}

TEST_CASE("nested calls finish and visit every pair once", "[workers]") {
  const auto thread_count = GENERATE(2u, 4u);
  const Topology topology;
  const Workers workers(topology, threads(thread_count));
  std::vector<std::vector<int>> seen(16, std::vector<int>(33, 0));
  workers.parallel_for(16, [&](std::uint32_t i) { workers.parallel_for(33, [&](std::uint32_t j) { ++seen[i][j]; }); });
  for (const auto& row : seen) REQUIRE(all_ones(row));
}

TEST_CASE("a thread that waits in a nested call takes up no foreign body", "[workers]") {
  const Topology topology;
  const Workers workers(topology, threads(4));
  std::atomic<int> violations{0};
  workers.parallel_for(64, [&](std::uint32_t) {
    thread_local bool busy = false;
    if (busy) ++violations;
    busy = true;
    workers.parallel_for(4, [](std::uint32_t) { std::this_thread::yield(); });
    busy = false;
  });
  REQUIRE(violations == 0);
}

TEST_CASE("calls from several threads share the workers", "[workers]") {
  const auto thread_count = GENERATE(2u, 3u);  // fewer slots than callers
  const Topology topology;
  const Workers workers(topology, threads(thread_count));
  std::vector<int> good(4, 0);
  std::vector<std::thread> callers;
  for (std::size_t c = 0; c < good.size(); ++c)
    callers.emplace_back([&, c] {
      for (std::uint32_t round = 0; round < 100; ++round) good[c] += all_ones(visits(workers, 1 + round * 3));
    });
  for (std::thread& caller : callers) caller.join();
  REQUIRE(good == std::vector<int>(4, 100));
}

TEST_CASE("an exception reaches the caller after all bodies have returned", "[workers]") {
  const auto thread_count = GENERATE(1u, 2u, 4u);
  const Topology topology;
  const Workers workers(topology, threads(thread_count));
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> running{0};
    try {
      workers.parallel_for(100, [&](std::uint32_t i) {
        ++running;
        std::this_thread::yield();
        --running;
        if (i == 7) throw std::runtime_error("seven");
      });
      FAIL("nothing was thrown");
    } catch (const std::runtime_error& error) {
      REQUIRE(std::string(error.what()) == "seven");
    }
    REQUIRE(running == 0);
    REQUIRE(all_ones(visits(workers, 50)));  // the pool survives
  }
}

TEST_CASE("pools come and go beside each other", "[workers]") {
  const Topology topology;
  for (std::uint32_t round = 0; round < 10; ++round) {
    const Workers first(topology, threads(2 + round % 3));
    const Workers second(topology, {.threads = 3, .pin = false});
    REQUIRE(all_ones(visits(first, 100)));
    REQUIRE(all_ones(visits(second, 100)));
  }
}

TEST_CASE("workers may go right after they came or worked", "[workers]") {
  const Topology topology;
  for (std::uint32_t round = 0; round < 300; ++round) {
    const Workers workers(topology, {.threads = 4, .pin = false, .spin = std::chrono::microseconds(round % 3 * 20)});
    if (round % 2 == 0) REQUIRE(all_ones(visits(workers, 5)));
  }
}

TEST_CASE("a worker that does not return is an error that names it, and the end of the workers", "[workers]") {
  const auto caller_throws = GENERATE(false, true);
  StuckCall call;
  const Topology topology;
  const Workers workers(topology, impatient(2));
  REQUIRE_FALSE(workers.lost());
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = call.run(workers, caller_throws);
  REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  CAPTURE(message);
  REQUIRE(message.find("worker 1 did not return") != std::string::npos);
  REQUIRE(message.find("50 ms") != std::string::npos);
  REQUIRE(workers.lost());
  REQUIRE(call.waiting() == 1);
  for (const std::uint32_t count : {0u, 1u, 2u, 100u}) REQUIRE(code_of_call(workers, count) == Errc::timeout);
  // It comes back: still lost, and joined.
  call.end();
  while (call.waiting() != 0) std::this_thread::yield();
  REQUIRE(code_of_call(workers, 2) == Errc::timeout);
}

TEST_CASE("the error names the core of a bound worker", "[workers]") {
  const Topology topology;
  const std::vector<std::uint32_t> cores = topology.core_order(0);
  WorkersOptions options = impatient(2);
  options.pin = true;
  StuckCall call;
  const std::string message = call.run(Workers(topology, options));
  REQUIRE(message.find("worker 1 (core " + std::to_string(cores[1 % cores.size()]) + ")") != std::string::npos);
}

TEST_CASE("workers of which one is stuck may go, and leave it behind", "[workers]") {
  const auto thread_count = GENERATE(2u, 4u);
  const Topology topology;
  for (int round = 0; round < 5; ++round) {
    StuckCall call;
    auto workers = std::make_unique<Workers>(topology, impatient(thread_count));
    REQUIRE_FALSE(call.run(*workers).empty());
    const auto begin = std::chrono::steady_clock::now();
    workers.reset();
    REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
    REQUIRE(call.waiting() != 0);
  }
}

TEST_CASE("calls under way when the workers are lost still finish", "[workers]") {
  const Topology topology;
  StuckCall call;
  const Workers workers(topology, {.threads = 3, .pin = false, .timeout = std::chrono::milliseconds(1000)});
  std::atomic<bool> begun{false};
  std::atomic<bool> lost{false};
  std::vector<int> seen(8, 0);
  std::thread other([&] {
    const auto self = std::this_thread::get_id();
    workers.parallel_for(8, [&](std::uint32_t i) {
      begun = true;
      while (std::this_thread::get_id() == self && !lost) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++seen[i];
    });
  });
  while (!begun) std::this_thread::yield();
  const std::string message = call.run(workers);
  lost = true;
  other.join();
  REQUIRE_FALSE(message.empty());
  REQUIRE(all_ones(seen));
}

TEST_CASE("a stuck worker of a nested call is an error of the outer one", "[workers]") {
  const Topology topology;
  StuckCall call;
  const Workers workers(topology, impatient(3));
  std::string message;
  REQUIRE_THROWS_AS(workers.parallel_for(1,
                                         [&](std::uint32_t) {
                                           message = call.run(workers);
                                           workers.parallel_for(2, [](std::uint32_t) {});
                                         }),
                    Error);
  REQUIRE_FALSE(message.empty());
}

TEST_CASE("workers without patience are refused", "[workers]") {
  const Topology topology;
  REQUIRE_THROWS_AS(Workers(topology, {.threads = 2, .timeout = std::chrono::milliseconds(0)}), Error);
}
