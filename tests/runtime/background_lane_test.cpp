// Work that nobody waits for, until somebody does.
#include "runtime/background_lane.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "sluice/error.hpp"
#include "sluice/trace.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;
using runtime::BackgroundLane;

namespace {

/// Holds up whoever passes until it is opened.
class Gate {
 public:
  void pass() {
    ++waiting_;
    while (!open_) std::this_thread::sleep_for(1ms);
    --waiting_;
  }
  /// Returns when nobody waits any more.
  void open() {
    open_ = true;
    while (waiting_ != 0) std::this_thread::yield();
  }
  void await_visitor() const {
    while (waiting_ == 0) std::this_thread::yield();
  }

 private:
  std::atomic<bool> open_{false};
  std::atomic<int> waiting_{0};
};

/// Background work that does not come to its end.
class StuckTrace final : public TraceSink {
 public:
  void record(const TraceEvent& event) noexcept override {
    if (std::string_view(event.name) == "observe") gate.pass();
  }
  Gate gate;
};

Errc code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  FAIL("no error was thrown");
  return {};
}

}  // namespace

TEST_CASE("the background lane runs jobs in order and hands their failures on once", "[background]") {
  std::vector<int> order;  // One thread writes it, and is joined or awaited before it is read.
  BackgroundLane lane(10s);
  BackgroundLane::Ticket last = 0;
  for (int i = 0; i < 50; ++i) last = lane.post([&order, i] { order.push_back(i); });
  lane.await(last, deadline_after(10s));
  REQUIRE(order.size() == 50);
  for (int i = 0; i < 50; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
  const BackgroundLane::Ticket bad = lane.post([] { throw std::runtime_error("bad"); });
  REQUIRE_THROWS_AS(lane.await(bad, deadline_after(10s)), std::runtime_error);
  REQUIRE_NOTHROW(lane.await(bad, deadline_after(10s)));
}

TEST_CASE("a background lane finishes what runs and drops what has not begun", "[background]") {
  std::atomic<int> ran{0};
  Gate gate;
  std::thread opener;
  {
    BackgroundLane lane(20s);
    (void)lane.post([&] {
      gate.pass();
      ++ran;
    });
    (void)lane.post([&] { ran += 100; });
    gate.await_visitor();
    opener = std::thread([&] {
      std::this_thread::sleep_for(50ms);
      gate.open();
    });
  }
  opener.join();
  REQUIRE(ran == 1);
}

TEST_CASE("a background job that does not return holds up neither its waiter nor the end", "[background]") {
  const auto gate = std::make_shared<Gate>();
  const auto begin = Clock::now();
  {
    BackgroundLane lane(50ms);
    const BackgroundLane::Ticket ticket = lane.post([gate] { gate->pass(); });
    gate->await_visitor();
    REQUIRE(code_of([&] { lane.await(ticket, deadline_after(20ms)); }) == Errc::timeout);
  }
  REQUIRE(Clock::now() - begin < 20s);
  gate->open();
}

TEST_CASE("background work that does not return ends the runtime with an error in bounded time", "[background]") {
  constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const Toy toy(kShape, 240, 21);
  StuckTrace trace;
  const auto workers = std::make_shared<cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2});
  // What is left behind still marks its end there, later than anyone can know. Never destroyed.
  static const auto& device = *new auto(std::make_shared<cpu::HostDevice>(workers));
  const auto begin = Clock::now();
  {
    RuntimeOptions options = toy_options(kShape, 300);
    options.timeout = 500ms;
    options.trace = &trace;
    Runtime runtime(options, device);
    const SequenceId id = runtime.begin(parse_policy("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=3%"));
    prefill(runtime, id, toy, 200, 64);
    REQUIRE(code_of([&] {
              for (std::uint32_t token = 200; token < toy.tokens(); ++token) step(runtime, id, toy, token);
            }) == Errc::timeout);
    trace.gate.await_visitor();
    REQUIRE(code_of([&] { (void)runtime.begin(parse_policy("full")); }) == Errc::device);
    REQUIRE(code_of([&] { runtime.end(id); }) == Errc::device);
  }
  REQUIRE(Clock::now() - begin < 30s);
  trace.gate.open();
}
