#include "cpu/host_stream.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/host_device.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<const Workers> workers() {
  static const auto pool = std::make_shared<const Workers>(Topology(), WorkersOptions{.threads = 2});
  return pool;
}

Deadline soon() { return deadline_after(60s); }

/// Enqueues any function, as a backend's verb would.
void call(Stream& stream, std::function<void()> run) { dynamic_cast<HostStream&>(stream).enqueue("verb", std::move(run)); }

template <class T>
Copy copy_of(T& to, const T& from) {
  return {.to = reinterpret_cast<std::byte*>(&to), .from = reinterpret_cast<const std::byte*>(&from), .bytes = sizeof(T)};
}

void copy(Stream& stream, const Copy& one) { stream.copy(std::span(&one, 1)); }

Errc synchronize_error(Stream& stream, Deadline deadline) {
  try {
    stream.synchronize(deadline);
  } catch (const Error& error) {
    return error.code();
  }
  throw std::logic_error("nothing was thrown");
}

/// Blocks its stream until opened; opens itself when it goes, so that no test hangs.
class Gate {
 public:
  explicit Gate(Stream& stream) { stream.wait(flag_, 1); }
  ~Gate() { open(); }
  void open() { flag_.signal(1); }

 private:
  Flag flag_;
};

}  // namespace

TEST_CASE("a stream runs its work in order", "[host_device][stream]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("order");
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) call(*stream, [&order, i] { order.push_back(i); });
  stream->synchronize(soon());
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  REQUIRE(order == expected);
}

TEST_CASE("enqueueing does not wait for the work", "[host_device][stream]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("async");
  const auto event = device.create_event();
  Gate gate(*stream);
  int ran = 0;
  call(*stream, [&ran] { ran = 1; });
  stream->record(*event);
  REQUIRE(event->state() == Event::State::pending);
  gate.open();
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
  REQUIRE(ran == 1);
}

TEST_CASE("the array of a copy batch may go at once, its memory may not", "[host_device][stream]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("copy");
  std::array<int, 64> from{};
  std::array<int, 64> to{};
  std::iota(from.begin(), from.end(), 1);
  {
    Gate gate(*stream);
    std::vector<Copy> batch;
    for (std::size_t i = 0; i < from.size(); ++i) batch.push_back(copy_of(to[i], from[i]));
    batch.push_back({});  // nothing to copy needs no address
    stream->copy(batch);
    batch.assign(batch.size(), Copy{});
    REQUIRE(to[0] == 0);
    gate.open();
    stream->synchronize(soon());
  }
  REQUIRE(to == from);
  stream->copy({});
  REQUIRE_THROWS_AS(copy(*stream, {.to = nullptr, .from = reinterpret_cast<std::byte*>(&from), .bytes = 4}), Error);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("an event that was never recorded is done, and waiting for it does nothing", "[host_device][event]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto event = device.create_event();
  REQUIRE(event->state() == Event::State::done);
  REQUIRE(event->reason().empty());
  stream->wait(*event);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("later work of a stream waits for an event of another", "[host_device][event]") {
  HostDevice device(workers());
  const auto producer = device.create_stream("producer");
  const auto consumer = device.create_stream("consumer");
  const auto event = device.create_event();
  int value = 0;
  int seen = -1;
  Gate gate(*producer);
  call(*producer, [&value] { value = 42; });
  producer->record(*event);
  consumer->wait(*event);
  call(*consumer, [&] { seen = value; });
  REQUIRE(synchronize_error(*consumer, deadline_after(20ms)) == Errc::timeout);
  gate.open();
  consumer->synchronize(soon());
  REQUIRE(seen == 42);
}

TEST_CASE("an event recorded again forgets the old point; who waits keeps it", "[host_device][event]") {
  HostDevice device(workers());
  const auto producer = device.create_stream("producer");
  const auto consumer = device.create_stream("consumer");
  const auto event = device.create_event();
  producer->record(*event);
  consumer->wait(*event);
  producer->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
  Gate gate(*producer);
  producer->record(*event);
  REQUIRE(event->state() == Event::State::pending);
  REQUIRE_NOTHROW(consumer->synchronize(soon()));  // waited for the first point only
  gate.open();
  producer->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
}

TEST_CASE("events of a stream bear times in the order of the stream", "[host_device][event]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto before = device.create_event();
  const auto after = device.create_event();
  const Clock::time_point begin = Clock::now();
  Clock::time_point between;
  stream->record(*before);
  call(*stream, [&between] { between = Clock::now(); });
  stream->record(*after);
  stream->synchronize(soon());
  REQUIRE(begin <= before->time());
  REQUIRE(before->time() <= between);
  REQUIRE(between <= after->time());
  REQUIRE(after->time() <= Clock::now());
}

TEST_CASE("an event may go before the stream reaches it", "[host_device][event]") {
  HostDevice device(workers());
  const auto first = device.create_stream("first");
  const auto second = device.create_stream("second");
  Gate gate(*first);
  {
    const auto event = device.create_event();
    first->record(*event);
    second->wait(*event);
  }
  gate.open();
  REQUIRE_NOTHROW(second->synchronize(soon()));
}

TEST_CASE("two streams in a ring of events pass a value round", "[host_device][event]") {
  HostDevice device(workers());
  const std::array streams{device.create_stream("a"), device.create_stream("b")};
  const std::array events{device.create_event(), device.create_event()};
  std::uint64_t value = 1;
  for (std::size_t lap = 0; lap < 400; ++lap) {
    const std::size_t me = lap % 2;
    streams[me]->wait(*events[1 - me]);
    call(*streams[me], [&value, me] { value = (value * 3 + me) % 1'000'003; });
    streams[me]->record(*events[me]);
  }
  for (const auto& stream : streams) stream->synchronize(soon());
  std::uint64_t expected = 1;
  for (std::size_t lap = 0; lap < 400; ++lap) expected = (expected * 3 + lap % 2) % 1'000'003;
  REQUIRE(value == expected);
}

TEST_CASE("flags hand data over in both directions", "[host_device][flag]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  Flag to_device;
  Flag to_host;
  std::uint64_t mail = 0;
  for (std::uint64_t round = 1; round <= 200; ++round) {
    stream->wait(to_device, round);
    call(*stream, [&mail] { mail *= 2; });
    stream->signal(to_host, round);
  }
  for (std::uint64_t round = 1; round <= 200; ++round) {
    mail = round;
    to_device.signal(round);
    const Deadline deadline = soon();
    while (to_host.state(round) == Flag::State::pending && Clock::now() < deadline) std::this_thread::yield();
    REQUIRE(to_host.state(round) == Flag::State::reached);
    REQUIRE(mail == 2 * round);
  }
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("a flag that does not come fails the next event, in time", "[host_device][flag]") {
  HostDevice device(workers(), {.flag_timeout = 20ms});
  const auto stream = device.create_stream("s");
  const auto event = device.create_event();
  Flag never;
  int later = 0;
  stream->wait(never, 7);
  call(*stream, [&later] { later = 1; });
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("20 ms") != std::string::npos);
  REQUIRE(later == 1);  // a failure does not stop the stream
}

TEST_CASE("a failed flag fails the next event", "[host_device][flag]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto event = device.create_event();
  Flag flag;
  stream->wait(flag, 3);
  stream->record(*event);
  flag.fail(3);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
}

TEST_CASE("an exception in a verb becomes a reason, not an end", "[host_device][failure]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("lane");
  const auto event = device.create_event();
  call(*stream, [] { throw Error(Errc::unsupported, "head_dim 17"); });
  call(*stream, [] { throw 17; });
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
  // The first failure is the one that is told.
  REQUIRE(event->reason() == "stream 'lane': verb: head_dim 17");

  call(*stream, [] { throw 17; });
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->reason() == "stream 'lane': verb: unknown exception");
}

TEST_CASE("a failure fails the next event or flag, which clears it", "[host_device][failure]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto first = device.create_event();
  const auto second = device.create_event();
  Flag flag;
  const auto fail = [&] { call(*stream, [] { throw std::runtime_error("broken"); }); };

  SECTION("event, then event") {
    fail();
    stream->record(*first);
    stream->record(*second);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::failed);
    REQUIRE(second->state() == Event::State::done);
    REQUIRE(second->reason().empty());
  }
  SECTION("flag, then flag") {
    fail();
    stream->signal(flag, 1);
    stream->synchronize(soon());
    REQUIRE(flag.state(1) == Flag::State::failed);
    stream->signal(flag, 2);
    stream->synchronize(soon());
    REQUIRE(flag.state(2) == Flag::State::reached);
  }
  SECTION("flag, then event") {
    fail();
    stream->signal(flag, 1);
    stream->record(*first);
    stream->synchronize(soon());
    REQUIRE(flag.state(1) == Flag::State::failed);
    REQUIRE(first->state() == Event::State::done);
  }
  SECTION("the event before it is not harmed") {
    stream->record(*first);
    fail();
    stream->record(*second);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::done);
    REQUIRE(second->state() == Event::State::failed);
  }
  SECTION("a recovered event is done again") {
    fail();
    stream->record(*first);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::failed);
    stream->record(*first);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::done);
  }
  SECTION("synchronize tells it and leaves it to the event") {
    fail();
    REQUIRE(synchronize_error(*stream, soon()) == Errc::device);
    REQUIRE(synchronize_error(*stream, soon()) == Errc::device);
    stream->record(*first);
    REQUIRE_NOTHROW(stream->synchronize(soon()));
    REQUIRE(first->state() == Event::State::failed);
  }
}

TEST_CASE("failure travels along waits from stream to stream", "[host_device][failure]") {
  HostDevice device(workers());
  const auto a = device.create_stream("a");
  const auto b = device.create_stream("b");
  const auto event_a = device.create_event();
  const auto event_b = device.create_event();
  const auto after = device.create_event();
  int ran = 0;
  call(*a, [] { throw std::runtime_error("broken"); });
  a->record(*event_a);
  b->wait(*event_a);
  call(*b, [&ran] { ran = 1; });
  b->record(*event_b);
  b->record(*after);
  b->synchronize(soon());
  REQUIRE(event_b->state() == Event::State::failed);
  REQUIRE(event_b->reason().find("broken") != std::string::npos);
  REQUIRE(after->state() == Event::State::done);
  REQUIRE(ran == 1);
  REQUIRE_NOTHROW(a->synchronize(soon()));
}

TEST_CASE("synchronize keeps its deadline and the work goes on", "[host_device][stream]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  Gate gate(*stream);
  int ran = 0;
  call(*stream, [&ran] { ran = 1; });
  REQUIRE(synchronize_error(*stream, deadline_after(10ms)) == Errc::timeout);
  REQUIRE(synchronize_error(*stream, Clock::now() - 1s) == Errc::timeout);
  gate.open();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(ran == 1);
  REQUIRE_NOTHROW(stream->synchronize(Clock::now() - 1s));  // nothing left to wait for
}

TEST_CASE("a stream destroyed with work in its queue leaves nobody waiting", "[host_device][stream]") {
  HostDevice device(workers());
  const auto other = device.create_stream("other");
  const auto event = device.create_event();
  const auto event_other = device.create_event();
  Flag never;
  Flag promised;
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> leak = token;
  {
    const auto stream = device.create_stream("doomed");
    SECTION("stuck at a flag") { stream->wait(never, 1); }
    SECTION("stuck at an event") {
      other->wait(never, 1);
      other->record(*event_other);
      stream->wait(*event_other);
    }
    SECTION("asleep") {
      device.misbehave({.seed = 3, .max_delay = 1h});
    }
    call(*stream, [kept = std::move(token)] { ++*kept; });
    stream->record(*event);
    stream->signal(promised, 5);
    if (event_other->state() == Event::State::done) other->wait(*event);
  }
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("destroyed") != std::string::npos);
  REQUIRE(promised.state(5) == Flag::State::failed);
  REQUIRE(leak.expired());
  never.signal(1);
}

TEST_CASE("objects of another device are refused", "[host_device]") {
  class Alien final : public Event {
    State state() const noexcept override { return State::done; }
    std::string reason() const override { return {}; }
    Clock::time_point time() const noexcept override { return {}; }
  } alien;
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  REQUIRE_THROWS_AS(stream->record(alien), Error);
  REQUIRE_THROWS_AS(stream->wait(alien), Error);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}
