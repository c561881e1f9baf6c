// Flags between host and GPU, and what becomes of events and flags when work fails, comes late or is dropped.
#include <chrono>
#include <string>
#include <thread>

#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/device_support.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

TEST_CASE("flags hand data over between host and GPU in both directions", "[cuda_device][flag]") {
  constexpr std::uint64_t kRounds = 200;
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(4096);
  Shared<Flag> to_device(*device);
  Shared<Flag> to_host(*device);
  Shared<std::uint64_t> mail(*device);
  Shared<std::uint64_t> answer(*device);
  const auto enqueue = [&](std::uint64_t round) {
    stream->wait(*to_device, round);
    copy(*stream, near->data(), &*mail, 8);
    copy(*stream, &*answer, near->data(), 8);
    stream->signal(*to_host, round);
  };
  const bool ahead = streams_wait(*device);
  for (std::uint64_t round = 1; ahead && round <= kRounds; ++round) enqueue(round);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    *mail = round * 1'000'003;
    to_device->signal(round);
    if (!ahead) enqueue(round);
    REQUIRE(await(*to_host, round));
    REQUIRE(*answer == round * 1'000'003);
  }
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("a failed flag fails the next CUDA event, and only that", "[cuda_device][flag]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  const auto next = device->create_event();
  Shared<Flag> flag(*device);
  const bool ahead = streams_wait(*device);
  if (!ahead) flag->fail(3);
  stream->wait(*flag, 3);
  stream->record(*event);
  stream->record(*next);
  if (ahead) {
    REQUIRE(event->state() == Event::State::pending);
    flag->fail(3);
  }
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("flag") != std::string::npos);
  REQUIRE(next->state() == Event::State::done);
}

TEST_CASE("a flag that failed is remembered although it rises further and goes", "[cuda_device][flag]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  {
    Shared<Flag> flag(*device);
    stream->wait(*flag, 1);
    stream->record(*event);
    flag->fail(1);
    stream->synchronize(soon());
    flag->signal(2);
  }
  REQUIRE(event->state() == Event::State::failed);
}

TEST_CASE("a flag that does not come fails the next CUDA event, in time", "[cuda_device][flag]") {
  const auto device = make_cuda_device({.flag_timeout = 50ms});
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  const auto near = device->allocate(4096);
  Shared<Flag> never(*device);
  Shared<std::uint64_t> word(*device);
  *word = 5;
  const Clock::time_point begin = Clock::now();
  stream->wait(*never, 7);
  copy(*stream, near->data(), &*word, 8);
  stream->record(*event);
  stream->synchronize(soon());
  const Clock::duration waited = Clock::now() - begin;
  REQUIRE(waited >= 50ms);
  REQUIRE(waited < 2s);
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("50 ms") != std::string::npos);
  REQUIRE(read(*stream, near->data()) == 5);  // a failure does not stop the stream
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
}

TEST_CASE("the clock of a flag starts when the stream gets there", "[cuda_device][flag]") {
  const auto device = make_cuda_device({.flag_timeout = 100ms});
  if (!streams_wait(*device)) return;
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  Shared<Flag> flag(*device);
  delay(*stream, 250'000);
  stream->wait(*flag, 1);
  stream->record(*event);
  std::this_thread::sleep_for(200ms);
  flag->signal(1);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
}

TEST_CASE("a failure fails the next event or flag of a CUDA stream, which clears it", "[cuda_device][failure]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("lane");
  const auto first = device->create_event();
  const auto second = device->create_event();
  Shared<Flag> flag(*device);

  SECTION("event, then event; the first reason is told") {
    fail(*stream, "broken");
    fail(*stream, "broken twice");
    stream->record(*first);
    stream->record(*second);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::failed);
    REQUIRE(first->reason() == "stream 'lane': broken");
    REQUIRE(second->state() == Event::State::done);
    REQUIRE(second->reason().empty());
  }
  SECTION("flag, then flag") {
    fail(*stream, "broken");
    stream->signal(*flag, 1);
    stream->synchronize(soon());
    REQUIRE(flag->state(1) == Flag::State::failed);
    stream->signal(*flag, 2);
    stream->synchronize(soon());
    REQUIRE(flag->state(2) == Flag::State::reached);
  }
  SECTION("flag, then event") {
    fail(*stream, "broken");
    stream->signal(*flag, 1);
    stream->record(*first);
    stream->synchronize(soon());
    REQUIRE(flag->state(1) == Flag::State::failed);
    REQUIRE(first->state() == Event::State::done);
  }
  SECTION("synchronize tells it and leaves it to the event") {
    fail(*stream, "broken");
    REQUIRE(synchronize_error(*stream, soon()) == Errc::device);
    REQUIRE(synchronize_error(*stream, soon()) == Errc::device);
    stream->record(*first);
    REQUIRE_NOTHROW(stream->synchronize(soon()));
    REQUIRE(first->state() == Event::State::failed);
    stream->record(*first);
    stream->synchronize(soon());
    REQUIRE(first->state() == Event::State::done);
  }
}

TEST_CASE("failure travels along waits from CUDA stream to stream", "[cuda_device][failure]") {
  const auto device = make_cuda_device();
  const auto a = device->create_stream("a");
  const auto b = device->create_stream("b");
  const auto event_a = device->create_event();
  const auto event_b = device->create_event();
  const auto after = device->create_event();
  SECTION("known when it is enqueued") {
    fail(*a, "broken");
    a->record(*event_a);
    b->wait(*event_a);
    b->record(*event_b);
    b->record(*after);
    b->synchronize(soon());
    REQUIRE(event_b->reason().find("broken") != std::string::npos);
  }
  SECTION("known when the flag fails") {
    if (!streams_wait(*device)) return;
    Shared<Flag> flag(*device);
    a->wait(*flag, 1);
    a->record(*event_a);
    b->wait(*event_a);
    b->record(*event_b);
    b->record(*after);
    flag->fail(1);
    b->synchronize(soon());
    REQUIRE(event_a->state() == Event::State::failed);
  }
  REQUIRE(event_b->state() == Event::State::failed);
  REQUIRE(after->state() == Event::State::done);
  REQUIRE_NOTHROW(a->synchronize(soon()));
}

TEST_CASE("synchronize of a CUDA stream keeps its deadline and the work goes on", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(4096);
  Shared<std::uint64_t> word(*device);
  *word = 9;
  Gate gate(*device, *stream);
  copy(*stream, near->data(), &*word, 8);
  const Clock::time_point begin = Clock::now();
  REQUIRE(synchronize_error(*stream, deadline_after(10ms)) == Errc::timeout);
  REQUIRE(synchronize_error(*stream, deadline_after(-1s)) == Errc::timeout);
  REQUIRE(Clock::now() - begin < 1s);
  gate.open();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(read(*stream, near->data()) == 9);
  REQUIRE_NOTHROW(stream->synchronize(deadline_after(-1s)));  // nothing left to wait for
}

TEST_CASE("a CUDA stream destroyed with work in its queue leaves nobody waiting", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto event = device->create_event();
  Shared<Flag> never(*device);
  const Clock::time_point begin = Clock::now();
  {
    const auto stream = device->create_stream("doomed");
    stream->wait(*never, 1);
    stream->record(*event);
  }
  REQUIRE(Clock::now() - begin < 5s);
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("destroyed") != std::string::npos);
  REQUIRE(never->state(1) == Flag::State::failed);
}

TEST_CASE("a CUDA stream may go while it waits for another", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto other = device->create_stream("other");
  const auto held = device->create_event();
  const auto event = device->create_event();
  Gate gate(*device, *other);
  other->record(*held);
  {
    const auto stream = device->create_stream("doomed");
    stream->wait(*held);
    stream->record(*event);
  }
  const auto fresh = device->create_stream("fresh");  // not the one that still waits
  REQUIRE_NOTHROW(fresh->synchronize(deadline_after(5s)));
  gate.open();
  other->synchronize(soon());
  const Deadline deadline = soon();
  while (event->state() == Event::State::pending && RunClock::now() < deadline) std::this_thread::yield();
  REQUIRE(event->state() == Event::State::done);
}
