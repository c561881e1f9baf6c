#include "runtime/executor.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using runtime::Executor;
using runtime::NodeRunner;
using scheduler::NodeKind;

namespace {

/// A runner whose device and link nodes are copies of one word, so that order shows as data.
class Words final : public NodeRunner {
 public:
  Words(Executor*& executor, Stream& link) : executor_(executor), link_(link) {}

  void issue(NodeKind kind) override {
    switch (kind) {
      case NodeKind::append: copy(executor_->device_stream(), 0, 1); break;
      case NodeKind::hand_over: copy(executor_->device_stream(), 1, 2); break;
      case NodeKind::write_through: word[3] = word[2]; break;
      case NodeKind::select: word[4] = word[3]; break;
      case NodeKind::fetch: copy(link_, 4, 5); break;
      case NodeKind::attend_fetched: copy(executor_->device_stream(), 5, 6); break;
      case NodeKind::attend_far: word[7] = word[4]; break;
      case NodeKind::merge: copy(executor_->device_stream(), 6, 8); break;
      default: break;
    }
    if (kind == throws_at) throw Error(Errc::invalid_argument, "on purpose");
  }

  std::uint64_t word[9] = {};
  NodeKind throws_at = NodeKind::promote;

 private:
  void copy(Stream& stream, int from, int to) {
    const Copy one{.to = reinterpret_cast<std::byte*>(&word[to]),
                   .from = reinterpret_cast<const std::byte*>(&word[from]),
                   .bytes = sizeof(std::uint64_t)};
    stream.copy({&one, 1});
  }
  Executor*& executor_;
  Stream& link_;
};

struct Rig {
  explicit Rig(const cpu::Misbehaviour& misbehaviour = {}, std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : workers(std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false, .numa_node = 0})),
        device(workers, {.memory_bytes = 0, .flag_timeout = timeout, .misbehaviour = misbehaviour}),
        link(device.create_stream("link")),
        executor(std::make_unique<Executor>(device, *link, timeout, nullptr)),
        runner(pointer, *link) {
    pointer = executor.get();
  }
  ~Rig() { link.reset(); }  // Before the executor, as stop() asks.
  cpu::Topology topology;
  std::shared_ptr<const cpu::Workers> workers;
  cpu::HostDevice device;
  std::unique_ptr<Stream> link;
  std::unique_ptr<Executor> executor;
  Executor* pointer = nullptr;
  Words runner;
};

/// A stream that says what it was asked to do, and does it.
class SpyStream final : public Stream {
 public:
  SpyStream(std::unique_ptr<Stream> inner, std::vector<std::string>& log) : inner_(std::move(inner)), log_(log) {}
  void copy(std::span<const Copy> batch) override {
    log_.push_back("work");
    inner_->copy(batch);
  }
  void record(Event& event) override {
    log_.push_back("record");
    inner_->record(event);
  }
  void wait(const Event& event) override {
    log_.push_back("wait");
    inner_->wait(event);
  }
  void signal(Flag& flag, std::uint64_t value) override {
    log_.push_back("signal");
    inner_->signal(flag, value);
  }
  void wait(const Flag& flag, std::uint64_t value) override { inner_->wait(flag, value); }
  void begin_batch() override { log_.push_back("begin"); }
  void end_batch() override {
    if (log_.empty() || log_.back() != "end") log_.push_back("end");
  }
  void synchronize(Deadline deadline) override { inner_->synchronize(deadline); }

 private:
  std::unique_ptr<Stream> inner_;
  std::vector<std::string>& log_;
};

class SpyDevice final : public Device {
 public:
  explicit SpyDevice(Device& inner) : inner_(inner) {}
  [[nodiscard]] const DeviceInfo& info() const noexcept override { return inner_.info(); }
  [[nodiscard]] Backend& backend() noexcept override { return inner_.backend(); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override { return inner_.allocate(bytes); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override {
    return inner_.allocate_pinned(bytes);
  }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override {
    return inner_.register_host(memory);
  }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    return std::make_unique<SpyStream>(inner_.create_stream(name), log);
  }
  [[nodiscard]] std::unique_ptr<Event> create_event() override { return inner_.create_event(); }
  std::vector<std::string> log;

 private:
  Device& inner_;
};

const scheduler::StepGraph& whole_graph() {
  static const auto graph =
      scheduler::build_step_graph({.rank_pages = true, .select = true, .fetch = true, .observe = true});
  return graph;
}

}  // namespace

TEST_CASE("every edge of the step graph is kept, whatever the delays", "[executor]") {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Rig rig({.seed = seed, .max_delay = std::chrono::microseconds(100), .reorder_copies = true});
    for (std::uint64_t run = 1; run <= 4; ++run) {
      CAPTURE(seed, run);
      rig.runner.word[0] = seed * 100 + run;
      rig.executor->run(whole_graph(), 0, rig.runner);
      REQUIRE(rig.runner.word[7] == seed * 100 + run);
      REQUIRE(rig.runner.word[8] == seed * 100 + run);
    }
  }
}

TEST_CASE("a failed copy fails the run with the node's name, and the next run works", "[executor]") {
  Rig rig;
  rig.device.misbehave({.seed = 3, .fail_copy = 1.0});
  try {
    rig.executor->run(whole_graph(), 5, rig.runner);
    FAIL("the run passed");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::device);
    REQUIRE(std::string(error.what()).find("of layer 5") != std::string::npos);
  }
  rig.device.misbehave({});
  rig.runner.word[0] = 42;
  rig.executor->run(whole_graph(), 5, rig.runner);
  REQUIRE(rig.runner.word[8] == 42);
}

TEST_CASE("a node that throws ends the run after the streams have run dry", "[executor]") {
  const NodeKind kind = GENERATE(NodeKind::append, NodeKind::select, NodeKind::fetch, NodeKind::attend_far, NodeKind::merge);
  CAPTURE(scheduler::to_string(kind));
  Rig rig({.seed = 9, .max_delay = std::chrono::microseconds(200)});
  rig.runner.throws_at = kind;
  REQUIRE_THROWS_AS(rig.executor->run(whole_graph(), 0, rig.runner), Error);
  rig.runner.throws_at = NodeKind::promote;
  rig.runner.word[0] = 7;
  rig.executor->run(whole_graph(), 0, rig.runner);
  REQUIRE(rig.runner.word[8] == 7);
}

TEST_CASE("a device that does not answer ends in a timeout", "[executor]") {
  Rig rig({}, std::chrono::milliseconds(60));
  // The stream waits for a flag that nobody raises; it gives up after the device's own deadline.
  const std::unique_ptr<Buffer> memory = rig.device.allocate_pinned(sizeof(Flag));
  const auto* flag = new (memory->data()) Flag;
  rig.executor->device_stream().wait(*flag, 1);
  const auto begin = Clock::now();
  REQUIRE_THROWS_AS(rig.executor->run(whole_graph(), 0, rig.runner), Error);
  REQUIRE(Clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("what the device does before the hand-over is one batch, over when anyone may look", "[executor]") {
  Rig rig;
  SpyDevice spy(rig.device);
  Executor executor(spy, *rig.link, std::chrono::seconds(20), nullptr);
  rig.pointer = &executor;
  for (std::uint64_t run = 1; run <= 3; ++run) {
    spy.log.clear();
    rig.runner.word[0] = run;
    executor.run(whole_graph(), 0, rig.runner);
    REQUIRE(rig.runner.word[8] == run);
    const std::vector<std::string> head{"begin", "work", "work", "end", "record", "signal"};
    REQUIRE(spy.log.size() > head.size());
    REQUIRE(std::equal(head.begin(), head.end(), spy.log.begin()));
    REQUIRE(std::count(spy.log.begin(), spy.log.end(), "begin") == 1);
  }
  executor.stop();
}
