#include "cpu/workers.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
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
