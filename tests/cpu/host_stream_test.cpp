#include "cpu/device/host_stream.hpp"

#include <array>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpu/host_support.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;
using namespace std::chrono_literals;

namespace {

void copy(Stream& stream, const Copy& one) { stream.copy(std::span(&one, 1)); }

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

TEST_CASE("an event recorded again forgets the old point, who waits keeps it", "[host_device][event]") {
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
    while (to_host.state(round) == Flag::State::pending && RunClock::now() < deadline) std::this_thread::yield();
    REQUIRE(to_host.state(round) == Flag::State::reached);
    REQUIRE(mail == 2 * round);
  }
  REQUIRE_NOTHROW(stream->synchronize(soon()));
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
