// What becomes of events, flags and waiters when work fails, comes late or is dropped.
#include <memory>
#include <stdexcept>
#include <string>

#include "tests/cpu/host_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/no_threads.hpp"

using namespace sluice;
using namespace sluice::cpu;
using namespace std::chrono_literals;

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
  REQUIRE(synchronize_error(*stream, deadline_after(-1s)) == Errc::timeout);
  gate.open();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(ran == 1);
  REQUIRE_NOTHROW(stream->synchronize(deadline_after(-1s)));  // nothing left to wait for
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
    SECTION("asleep") { device.inject({.seed = 3, .max_delay = 1h}); }
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

TEST_CASE("a stream that gets no thread is out of capacity", "[host_device][failure]") {
  HostDevice device(workers());
  {
    const test::NoThreads none;
    REQUIRE(test::code_of([&] { return device.create_stream("lane"); }) == Errc::out_of_capacity);
  }
  const auto stream = device.create_stream("lane");
  int ran = 0;
  call(*stream, [&ran] { ran = 1; });
  stream->synchronize(soon());
  REQUIRE(ran == 1);
}
