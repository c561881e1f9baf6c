#include "sluice/run_clock.hpp"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace std::chrono_literals;

TEST_CASE("a span in which nobody looked at the clock counts little", "[run_clock]") {
  const auto begin = RunClock::now();
  std::this_thread::sleep_for(50ms);
  REQUIRE(RunClock::now() - begin <= RunClock::kLongestGap);
}

TEST_CASE("the clock never goes back, whoever looks", "[run_clock]") {
  const auto look = [] {
    auto last = RunClock::now();
    for (int i = 0; i < 10'000; ++i) {
      const auto now = RunClock::now();
      if (now < last) return false;
      last = now;
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = look(); });
  REQUIRE(look());
  thread.join();
  REQUIRE(other);
}

TEST_CASE("a deadline passes for those who wait for it", "[run_clock]") {
  const auto begin = std::chrono::steady_clock::now();
  const Deadline deadline = deadline_after(20ms);
  while (RunClock::now() < deadline) std::this_thread::sleep_for(100us);
  REQUIRE(std::chrono::steady_clock::now() - begin >= 20ms);
}

TEST_CASE("waiting on a condition variable ends at the deadline, or when it is true", "[run_clock]") {
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;
  std::unique_lock lock(mutex);
  REQUIRE_FALSE(wait_on(changed, lock, deadline_after(10ms), [&] { return set; }));
  std::thread thread([&] {
    const std::lock_guard other(mutex);
    set = true;
    changed.notify_all();
  });
  REQUIRE(wait_on(changed, lock, deadline_after(60s), [&] { return set; }));
  REQUIRE(wait_on(changed, lock, deadline_after(-1s), [&] { return set; }));
  lock.unlock();
  thread.join();
}
