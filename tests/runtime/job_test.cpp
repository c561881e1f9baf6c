// Work in pieces that threads share: what becomes of it when pieces fail, hang and are abandoned.
#include "runtime/background/job.hpp"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"

using sluice::runtime::Job;
using sluice::runtime::Jobs;
using namespace std::chrono_literals;

TEST_CASE("pieces are done once, by whoever comes, and the caller helps", "[job]") {
  for (const std::uint32_t pieces : {0u, 1u, 1'000u}) {
    std::vector<std::atomic<int>> done(pieces);
    const auto job = std::make_shared<Job>(pieces, [&](std::uint32_t i) { ++done[i]; });
    Jobs jobs;
    jobs.add(job);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (jobs.work()) {
        }
      });
    }
    REQUIRE(job->await(60s));
    REQUIRE(job->idle());
    job->rethrow();
    for (const auto& each : done) REQUIRE(each == 1);
    threads.clear();
    REQUIRE_FALSE(jobs.work());
    REQUIRE_FALSE(jobs.any());
    REQUIRE(job.use_count() == 1);  // What it owns goes with its owner.
  }
  // Alone: with nobody else it is the caller's.
  int done = 0;
  Job job(3, [&](std::uint32_t) { ++done; });
  REQUIRE(job.await(1ms));
  REQUIRE(done == 3);
}

TEST_CASE("the first piece that fails is the last that is begun, and says why", "[job]") {
  std::atomic<int> begun{0};
  Job job(100, [&](std::uint32_t i) {
    ++begun;
    if (i == 3) throw std::runtime_error("no");
  });
  REQUIRE(job.await(60s));
  REQUIRE(begun == 4);
  REQUIRE_THROWS_AS(job.rethrow(), std::runtime_error);
}

TEST_CASE("who waits for a piece that hangs gives up, and the thread keeps what it uses", "[job]") {
  std::atomic<bool> held{false}, open{false};
  const auto owned = std::make_shared<int>(7);
  auto job = std::make_shared<Job>(4, [&, owned](std::uint32_t) {
    if (held.exchange(true)) return;
    while (!open && *owned == 7) std::this_thread::sleep_for(1ms);
  });
  std::thread stuck([job] { (void)job->work(); });
  while (!held) std::this_thread::yield();
  REQUIRE_FALSE(job->await(20ms));
  REQUIRE_FALSE(job->left());
  REQUIRE_FALSE(job->idle());
  REQUIRE_FALSE(job->work());
  job.reset();
  REQUIRE(owned.use_count() == 2);
  open = true;
  stuck.join();
  REQUIRE(owned.use_count() == 1);
}

TEST_CASE("jobs are done in their order, and those that were given up are passed over", "[job]") {
  std::vector<int> order;
  const auto job = [&](int name) {
    return std::make_shared<Job>(2, [&order, name](std::uint32_t) { order.push_back(name); });
  };
  const auto first = job(1), second = job(2), third = job(3);
  Jobs jobs;
  for (const auto& each : {first, second, third}) jobs.add(each);
  second->abandon();
  REQUIRE(second->idle());
  while (jobs.work()) {
  }
  REQUIRE(order == std::vector<int>{1, 1, 3, 3});
}
