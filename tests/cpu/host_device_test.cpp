#include "cpu/device/host_device.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/device/host_stream.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "tests/cpu/host_support.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;
using namespace std::chrono_literals;

namespace {

/// A verb: to[i] = from[i], when the stream gets there.
void enqueue_copy(Stream& stream, std::span<const float> from, std::span<float> to) {
  dynamic_cast<HostStream&>(stream).enqueue("copy_row", [=] { std::ranges::copy(from, to.begin()); });
}

/// What became of a fixed program of copies and verbs, one letter per operation. Letters differ between
/// seeds; for one seed they must not.
std::string outcome(const FaultOptions& faults) {
  HostDevice device(workers(), {.faults = faults});
  const std::array streams{device.create_stream("a"), device.create_stream("b")};
  const auto event = device.create_event();
  std::string letters;
  for (std::uint32_t i = 0; i < 24; ++i) {
    Stream& stream = *streams[i % 2];
    const std::vector<float> from{1, 2, 3, 4};
    std::vector<float> to(4, 0);
    if (i % 3 == 0) {
      enqueue_copy(stream, from, to);
    } else {
      std::vector<Copy> batch;
      for (std::size_t j = 0; j < 4; ++j) batch.push_back(copy_of(to[j], from[j]));
      stream.copy(batch);
    }
    stream.record(*event);
    stream.synchronize(soon());
    const auto copied = static_cast<char>(std::count_if(to.begin(), to.end(), [](float x) { return x != 0; }));
    const bool failed = event->state() == Event::State::failed;
    REQUIRE(failed == (copied < 4));
    REQUIRE(failed == !event->reason().empty());
    letters += static_cast<char>('0' + copied);
  }
  REQUIRE(device.injected_failures() ==
          24u - static_cast<std::uint64_t>(std::count(letters.begin(), letters.end(), '4')));
  return letters;
}

}  // namespace

TEST_CASE("the host device says what it is", "[host_device]") {
  HostDevice device(workers(), {.memory_bytes = 5 * MiB});
  REQUIRE_FALSE(device.info().own_processor);
  REQUIRE_FALSE(device.info().captures);
  REQUIRE(device.info().memory_bytes == 5 * MiB);
  REQUIRE_FALSE(device.info().name.empty());
}

TEST_CASE("device memory is aligned and counted until it is freed", "[host_device][memory]") {
  HostDevice device(workers(), {.memory_bytes = 1 * MiB});
  auto half = device.allocate(512 * KiB);
  REQUIRE(reinterpret_cast<std::uintptr_t>(half->data()) % 4096 == 0);
  REQUIRE(half->bytes() == 512 * KiB);
  REQUIRE(code_of([&] { return device.allocate(512 * KiB + 1); }) == Errc::out_of_capacity);
  const auto rest = device.allocate(512 * KiB);
  REQUIRE(code_of([&] { return device.allocate(1); }) == Errc::out_of_capacity);
  half.reset();
  REQUIRE(device.allocate(1)->bytes() == 1);

  // Nothing can be allocated and still has an address; pinned memory of the host does not count.
  const auto none = device.allocate(0);
  REQUIRE(none->bytes() == 0);
  REQUIRE(none->data() != nullptr);
  REQUIRE(device.allocate_pinned(2 * MiB)->bytes() == 2 * MiB);
}

TEST_CASE("absurd sizes are refused, not tried", "[host_device][memory]") {
  HostDevice device(workers());
  for (const std::uint64_t bytes : {~std::uint64_t{0}, ~std::uint64_t{0} - 4000, std::uint64_t{1} << 62}) {
    CAPTURE(bytes);
    REQUIRE(code_of([&] { return device.allocate(bytes); }) == Errc::out_of_capacity);
    REQUIRE(code_of([&] { return device.allocate_pinned(bytes); }) == Errc::out_of_capacity);
  }
}

TEST_CASE("pinned memory is zero-filled", "[host_device][memory]") {
  HostDevice device(workers());
  for (int round = 0; round < 3; ++round) {
    const auto buffer = device.allocate_pinned(100'000);
    REQUIRE(
        std::all_of(buffer->data(), buffer->data() + buffer->bytes(), [](std::byte b) { return b == std::byte{0}; }));
    std::memset(buffer->data(), 0xff, buffer->bytes());  // what the next round would find
  }
}

TEST_CASE("memory is registered once at a time", "[host_device][memory]") {
  HostDevice device(workers());
  std::vector<std::byte> memory(100);
  const std::span all(memory);
  auto middle = device.register_host(all.subspan(40, 20));
  for (const auto& [begin, bytes] : {std::pair{40u, 20u}, {0u, 100u}, {0u, 41u}, {59u, 10u}, {45u, 5u}}) {
    CAPTURE(begin, bytes);
    REQUIRE(code_of([&] { return device.register_host(all.subspan(begin, bytes)); }) == Errc::device);
  }
  const auto before = device.register_host(all.first(40));
  const auto after = device.register_host(all.subspan(60));
  middle.reset();
  REQUIRE_NOTHROW(middle = device.register_host(all.subspan(40, 20)));
  REQUIRE(code_of([&] { return device.register_host({}); }) == Errc::device);
}

TEST_CASE("memory is filled when its stream gets there", "[host_device]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto buffer = device.allocate(100);
  const std::span<std::byte> bytes(buffer->data(), 100);
  Flag go;
  stream->fill(bytes, std::byte{1});
  stream->synchronize(soon());
  stream->wait(go, 1);
  stream->fill(bytes.subspan(3, 90), std::byte{0xff});
  stream->fill({}, std::byte{7});
  REQUIRE(std::ranges::count(bytes, std::byte{1}) == 100);
  go.signal(1);
  stream->synchronize(soon());
  REQUIRE(std::ranges::count(bytes, std::byte{0xff}) == 90);
  REQUIRE(bytes[2] == std::byte{1});
  REQUIRE(bytes[93] == std::byte{1});

  device.inject({.fail_copy = 1.0});
  const auto event = device.create_event();
  stream->fill(bytes, std::byte{5});
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(bytes[0] == std::byte{1});
}

TEST_CASE("a stream of another device is refused", "[host_device][stages]") {
  class Alien final : public Stream {
    void copy(std::span<const Copy>) override {}
    void fill(std::span<std::byte>, std::byte) override {}
    void record(Event&) override {}
    void wait(const Event&) override {}
    void signal(Flag&, std::uint64_t) override {}
    void wait(const Flag&, std::uint64_t) override {}
    void synchronize(Deadline) override {}
  } alien;
  HostDevice device(workers());
  REQUIRE(code_of([&] { device.forward_verbs()->end({}, static_cast<Stream*>(&alien)); }) == Errc::invalid_argument);
}

TEST_CASE("injected failures repeat with their seed and fail exactly what did not happen",
          "[host_device][faults]") {
  FaultOptions faults{.max_delay = 50us, .reorder_copies = true, .fail_copy = 0.5, .fail_verb = 0.5};
  std::vector<std::string> all;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    faults.seed = seed;
    all.push_back(outcome(faults));
    REQUIRE(outcome(faults) == all.back());
  }
  std::sort(all.begin(), all.end());
  REQUIRE(std::unique(all.begin(), all.end()) == all.end());
  // Whole batches, lost ones and torn ones all occur.
  const std::string together = std::accumulate(all.begin(), all.end(), std::string{});
  for (const char letter : {'0', '1', '2', '3', '4'}) REQUIRE(together.find(letter) != std::string::npos);
}

TEST_CASE("a device that always fails executes nothing, a reformed one everything", "[host_device][faults]") {
  HostDevice device(workers());
  const auto stream = device.create_stream("s");
  const auto event = device.create_event();
  const std::vector<float> in{1, 2};
  std::vector<float> out(2, 0);
  std::vector<std::byte> memory(16);

  device.inject({.fail_verb = 1.0, .fail_allocation = 1.0, .fail_registration = 1.0});
  enqueue_copy(*stream, in, out);
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::failed);
  REQUIRE(event->reason().find("copy_row: injected failure") != std::string::npos);
  REQUIRE(out == std::vector<float>(2, 0));
  REQUIRE(code_of([&] { return device.allocate(1); }) == Errc::out_of_capacity);
  REQUIRE(code_of([&] { return device.allocate_pinned(1); }) == Errc::out_of_capacity);
  REQUIRE(code_of([&] { return device.register_host(memory); }) == Errc::device);
  REQUIRE(device.injected_failures() == 4);

  device.inject({});
  enqueue_copy(*stream, in, out);
  stream->record(*event);
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
  REQUIRE(out == in);
  REQUIRE_NOTHROW(device.allocate(1));
  REQUIRE_NOTHROW(device.register_host(memory));
  REQUIRE(device.injected_failures() == 4);
}

TEST_CASE("delays and reordering never change what the contract orders", "[host_device][faults]") {
  // Two streams and the host pass a block round: link copies in, compute doubles, link copies out and
  // tells the host. Every hand-over is ordered by an event or a flag, so no seed may alter the sums.
  constexpr std::size_t kWords = 16;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    HostDevice device(workers(), {.faults = {.seed = seed, .max_delay = 30us, .reorder_copies = true}});
    const auto link = device.create_stream("link");
    const auto compute = device.create_stream("compute");
    const auto copied = device.create_event();
    const auto computed = device.create_event();
    std::array<float, kWords> host{};
    std::array<float, kWords> near{};
    std::array<float, kWords> result{};
    Flag ready;
    Flag finished;
    for (std::uint64_t round = 1; round <= 4; ++round) {
      link->wait(ready, round);
      std::vector<Copy> in;
      std::vector<Copy> out;
      for (std::size_t i = 0; i < kWords; ++i) {
        in.push_back(copy_of(near[i], host[i]));
        out.push_back(copy_of(host[i], result[kWords - 1 - i]));
      }
      link->copy(in);
      link->record(*copied);
      compute->wait(*copied);
      enqueue_copy(*compute, near, result);
      compute->record(*computed);
      link->wait(*computed);
      link->copy(out);
      link->signal(finished, round);

      for (std::size_t i = 0; i < kWords; ++i) host[i] += static_cast<float>(round * i);
      const auto before = host;
      ready.signal(round);
      const Deadline deadline = soon();
      while (finished.state(round) == Flag::State::pending && RunClock::now() < deadline) std::this_thread::yield();
      REQUIRE(finished.state(round) == Flag::State::reached);
      for (std::size_t i = 0; i < kWords; ++i) REQUIRE(host[i] == before[kWords - 1 - i]);
    }
  }
}

TEST_CASE("reordering does reorder", "[host_device][faults]") {
  // All copies of the batch write the same word, which the contract leaves open: the last one wins.
  HostDevice device(workers(), {.faults = {.seed = 1, .reorder_copies = true}});
  const auto stream = device.create_stream("s");
  const std::array<int, 8> from{1, 2, 3, 4, 5, 6, 7, 8};
  bool different = false;
  for (int round = 0; round < 20; ++round) {
    int to = 0;
    std::vector<Copy> batch;
    for (const int& word : from) batch.push_back(copy_of(to, word));
    stream->copy(batch);
    stream->synchronize(soon());
    different = different || to != 8;
  }
  REQUIRE(different);
}

TEST_CASE("options outside their range are refused", "[host_device]") {
  REQUIRE(code_of([] { return HostDevice(nullptr).info(); }) == Errc::invalid_argument);
  REQUIRE(code_of([] { return HostDevice(workers(), {.flag_timeout = -1ms}).info(); }) == Errc::invalid_argument);
  HostDevice device(workers());
  const auto refuses = [&](const FaultOptions& wrong) {
    return code_of([&] { device.inject(wrong); }) == Errc::invalid_argument;
  };
  REQUIRE(refuses({.fail_copy = 1.5}));
  REQUIRE(refuses({.fail_verb = -0.1}));
  REQUIRE(refuses({.fail_allocation = std::numeric_limits<double>::quiet_NaN()}));
  REQUIRE(refuses({.max_delay = -1us}));
}
