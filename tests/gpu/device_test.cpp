// The contract of include/sluice/device.hpp on a GPU: memory, copies, events, and what is refused.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/device/param_ring.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/device_support.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

TEST_CASE("the CUDA device says what it is", "[cuda_device]") {
  REQUIRE(cuda_devices() > 0);
  const auto device = make_cuda_device({.memory_bytes = 5 * MiB});
  REQUIRE(device->info().own_processor);
  REQUIRE(device->info().captures);
  REQUIRE(device->info().visible_bus_ids.size() == static_cast<std::size_t>(cuda_devices()));
  REQUIRE(device->info().visible_bus_ids[0] == device->info().pci_bus_id);
  REQUIRE_FALSE(device->info().pci_bus_id.empty());
  REQUIRE(device->info().memory_bytes == 5 * MiB);
  REQUIRE_FALSE(device->info().name.empty());
  REQUIRE(make_cuda_device()->info().memory_bytes > 1 * GiB);
}

TEST_CASE("wrong options of a CUDA device are refused", "[cuda_device]") {
  REQUIRE(code_of([] { return make_cuda_device({.ordinal = 99}); }) == Errc::device);
  REQUIRE(code_of([] { return make_cuda_device({.ordinal = -1}); }) == Errc::device);
  REQUIRE(code_of([] { return make_cuda_device({.flag_timeout = -1ms}); }) == Errc::invalid_argument);
  auto profile = std::make_shared<TransferProfile>();
  profile->gather_blocks = 0;
  REQUIRE(code_of([&] { return make_cuda_device({.profile = profile}); }) == Errc::invalid_argument);
  REQUIRE(parse_transfer_path("gather") == TransferPath::gather);
  REQUIRE(code_of([] { return parse_transfer_path("carrier-pigeon"); }) == Errc::invalid_argument);
}

TEST_CASE("CUDA memory is aligned and counted until it is freed", "[cuda_device][memory]") {
  const auto device = make_cuda_device({.memory_bytes = 1 * MiB});
  auto half = device->allocate(512 * KiB);
  REQUIRE(reinterpret_cast<std::uintptr_t>(half->data()) % 4096 == 0);
  REQUIRE(half->bytes() == 512 * KiB);
  REQUIRE(code_of([&] { return device->allocate(512 * KiB + 1); }) == Errc::out_of_capacity);
  const auto rest = device->allocate(512 * KiB);
  REQUIRE(code_of([&] { return device->allocate(1); }) == Errc::out_of_capacity);
  half.reset();
  const auto small = device->allocate(1);
  const auto other = device->allocate(17);
  REQUIRE(small->bytes() == 1);
  REQUIRE(reinterpret_cast<std::uintptr_t>(small->data()) % 4096 == 0);
  REQUIRE(reinterpret_cast<std::uintptr_t>(other->data()) % 4096 == 0);
  REQUIRE(small->data() != other->data());
  REQUIRE(device->allocate(0)->data() != nullptr);
  REQUIRE(device->allocate_pinned(2 * MiB)->bytes() == 2 * MiB);  // does not count
}

TEST_CASE("a CUDA device refuses absurd sizes", "[cuda_device][memory]") {
  const auto device = make_cuda_device();
  for (const std::uint64_t bytes : {~std::uint64_t{0}, ~std::uint64_t{0} - 4000, std::uint64_t{1} << 62}) {
    CAPTURE(bytes);
    REQUIRE(code_of([&] { return device->allocate(bytes); }) == Errc::out_of_capacity);
    REQUIRE(code_of([&] { return device->allocate_pinned(bytes); }) == Errc::out_of_capacity);
  }
  const auto stream = device->create_stream("s");  // nothing is left behind
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("pinned CUDA memory is zero-filled", "[cuda_device][memory]") {
  const auto device = make_cuda_device();
  for (int round = 0; round < 3; ++round) {
    const auto buffer = device->allocate_pinned(100'000);
    const std::span all(buffer->data(), buffer->bytes());
    REQUIRE(std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{0}; }));
    std::memset(buffer->data(), 0xff, buffer->bytes());
  }
}

TEST_CASE("host memory is registered with a CUDA device once at a time", "[cuda_device][memory]") {
  const auto device = make_cuda_device();
  const Pages pages(64 * KiB);
  const auto all = pages.all();
  auto middle = device->register_host(all.subspan(16 * KiB, 16 * KiB));
  for (const auto& [begin, bytes] : {std::pair{16u, 16u}, {0u, 64u}, {0u, 17u}, {31u, 4u}, {20u, 4u}}) {
    CAPTURE(begin, bytes);
    REQUIRE(code_of([&] { return device->register_host(all.subspan(begin * KiB, bytes * KiB)); }) == Errc::device);
  }
  const auto before = device->register_host(all.first(16 * KiB));
  const auto after = device->register_host(all.subspan(32 * KiB));
  middle.reset();
  REQUIRE_NOTHROW(middle = device->register_host(all.subspan(16 * KiB, 16 * KiB)));
  REQUIRE(code_of([&] { return device->register_host({}); }) == Errc::device);
  const auto second = make_cuda_device();
  REQUIRE(code_of([&] { return second->register_host(all.first(4 * KiB)); }) == Errc::device);  // CUDA's own refusal
}

TEST_CASE("copies go both ways, from pinned and from ordinary memory", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(1 * MiB);
  std::vector<std::uint32_t> from(256 * 1024);
  std::iota(from.begin(), from.end(), 7u);
  std::vector<std::uint32_t> to(from.size());
  copy(*stream, near->data(), from.data(), 1 * MiB);
  copy(*stream, to.data(), near->data(), 1 * MiB);
  stream->synchronize(soon());
  REQUIRE(to == from);
  const auto pinned = device->allocate_pinned(1 * MiB);
  copy(*stream, pinned->data(), near->data(), 1 * MiB);
  stream->synchronize(soon());
  REQUIRE(std::memcmp(pinned->data(), from.data(), 1 * MiB) == 0);
}

TEST_CASE("CUDA memory is filled to the byte, behind what was queued before", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(8 * KiB);
  std::vector<std::byte> wanted(8 * KiB, std::byte{0xee});
  std::vector<std::byte> found(wanted.size());
  copy(*stream, near->data(), wanted.data(), wanted.size());
  for (const auto& [at, bytes] : {std::pair{0u, 0u}, {1u, 1u}, {3u, 2u}, {7u, 17u}, {129u, 4097u}, {8191u, 1u}}) {
    const auto value = static_cast<std::byte>(bytes);
    stream->fill({near->data() + at, bytes}, value);
    std::fill_n(wanted.begin() + at, bytes, value);
  }
  copy(*stream, found.data(), near->data(), found.size());
  stream->synchronize(soon());
  REQUIRE(found == wanted);
  const auto pinned = device->allocate_pinned(5);  // A copy that is queued behind a fill reads what it left.
  stream->fill({pinned->data() + 1, 3}, std::byte{9});
  copy(*stream, near->data(), pinned->data(), 5);
  copy(*stream, found.data(), near->data(), 5);
  stream->synchronize(soon());
  for (std::size_t i = 0; i < 5; ++i) REQUIRE(found[i] == (i == 0 || i == 4 ? std::byte{0} : std::byte{9}));
}

TEST_CASE("the array of a CUDA copy batch may go at once", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(64 * KiB);
  const auto host = device->allocate_pinned(128 * KiB);
  for (std::size_t i = 0; i < 64 * KiB; ++i) host->data()[i] = static_cast<std::byte>(i * 31 >> 3);
  std::vector<Copy> batch;
  for (std::uint64_t i = 0; i < 64; ++i)
    batch.push_back({.to = near->data() + (63 - i) * KiB, .from = host->data() + i * KiB, .bytes = 1 * KiB});
  batch.push_back({});  // nothing to copy needs no address
  stream->copy(batch);
  batch.assign(batch.size(), Copy{});
  copy(*stream, host->data() + 64 * KiB, near->data(), 64 * KiB);
  stream->synchronize(soon());
  for (std::uint64_t i = 0; i < 64; ++i)
    REQUIRE(std::memcmp(host->data() + 64 * KiB + (63 - i) * KiB, host->data() + i * KiB, 1 * KiB) == 0);
  stream->copy({});
  REQUIRE(code_of([&] {
            copy(*stream, nullptr, host->data(), 4);
            return 0;
          }) == Errc::invalid_argument);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("no thread watches over flags before a stream waits for one", "[cuda_device][flag]") {
  const auto watchdogs = [] {
    int found = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::ifstream(thread.path() / "comm") >> name;
      found += name == "sluice-watchdog" ? 1 : 0;
    }
    return found;
  };
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto stream = device->create_stream("s");
  const auto near = device->allocate(4096);
  Shared<std::uint64_t> word(*device);
  copy(*stream, near->data(), &*word, 8);
  stream->synchronize(soon());
  REQUIRE(watchdogs() == 0);
  Gate gate(*device, *stream);
  REQUIRE(watchdogs() == 1);
  gate.open();
  stream->synchronize(soon());
}

TEST_CASE("a CUDA event that was never recorded is done", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  REQUIRE(event->state() == Event::State::done);
  REQUIRE(event->reason().empty());
  stream->wait(*event);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("enqueueing does not wait for the GPU, and events tell when it is through", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  Gate gate(*device, *stream);
  stream->record(*event);
  REQUIRE(event->state() == Event::State::pending);
  gate.open();
  stream->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
}

TEST_CASE("later work of a CUDA stream waits for an event of another", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto producer = device->create_stream("producer");
  const auto consumer = device->create_stream("consumer");
  const auto event = device->create_event();
  const auto near = device->allocate(4096);
  Shared<std::uint64_t> source(*device);
  Shared<std::uint64_t> seen(*device);
  *source = 42;
  Gate gate(*device, *producer);
  copy(*producer, near->data(), &*source, 8);
  producer->record(*event);
  consumer->wait(*event);
  copy(*consumer, &*seen, near->data(), 8);
  REQUIRE(synchronize_error(*consumer, deadline_after(20ms)) == Errc::timeout);
  gate.open();
  consumer->synchronize(soon());
  REQUIRE(*seen == 42);
}

TEST_CASE("a CUDA event recorded again forgets the old point, and who waits keeps it", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto producer = device->create_stream("producer");
  const auto consumer = device->create_stream("consumer");
  const auto event = device->create_event();
  producer->record(*event);
  consumer->wait(*event);
  producer->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
  Gate gate(*device, *producer);
  producer->record(*event);
  REQUIRE(event->state() == Event::State::pending);
  REQUIRE_NOTHROW(consumer->synchronize(soon()));
  gate.open();
  producer->synchronize(soon());
  REQUIRE(event->state() == Event::State::done);
}

TEST_CASE("CUDA events bear times of the host's clock, in order", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  const auto before = device->create_event();
  const auto after = device->create_event();
  stream->synchronize(soon());
  const Clock::time_point begin = Clock::now();
  stream->record(*before);
  delay(*stream, 3000);
  stream->record(*after);
  stream->synchronize(soon());
  const Clock::time_point end = Clock::now();
  REQUIRE(begin <= before->time());
  REQUIRE(before->time() + 2900us <= after->time());
  REQUIRE(after->time() <= end);
  REQUIRE(after->time() == after->time());
  // Long after the fact the answer is the same, to the clock's rounding.
  stream->record(*before);
  stream->synchronize(soon());
  const Clock::time_point now = Clock::now();
  std::this_thread::sleep_for(1200ms);
  REQUIRE(before->state() == Event::State::done);
  REQUIRE(before->time() <= now + 50us);
}

TEST_CASE("a CUDA event may go before the stream reaches it", "[cuda_device][event]") {
  const auto device = make_cuda_device();
  if (!streams_wait(*device)) return;
  const auto first = device->create_stream("first");
  const auto second = device->create_stream("second");
  Gate gate(*device, *first);
  {
    const auto event = device->create_event();
    first->record(*event);
    second->wait(*event);
  }
  gate.open();
  REQUIRE_NOTHROW(second->synchronize(soon()));
}

TEST_CASE("what is not CUDA's or not visible to it is refused", "[cuda_device]") {
  class Alien final : public Event {
    State state() const noexcept override { return State::done; }
    std::string reason() const override { return {}; }
    Clock::time_point time() const noexcept override { return {}; }
  } alien;
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  REQUIRE_THROWS_AS(stream->record(alien), Error);
  REQUIRE_THROWS_AS(stream->wait(alien), Error);
  REQUIRE_THROWS_AS(gpu::cuda_stream(nullptr, "verb"), Error);
  Flag invisible;
  REQUIRE_THROWS_AS(stream->signal(invisible, 1), Error);
  REQUIRE_THROWS_AS(stream->wait(invisible, 1), Error);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("streams have scratch memory with zeroed counters and, named 'device', precedence", "[cuda_device][stream]") {
  const auto device = make_cuda_device();
  for (int round = 0; round < 2; ++round) {
    const auto stream = device->create_stream("device");
    const auto other = device->create_stream("link");
    int high = 0;
    int low = 0;
    REQUIRE(cudaStreamGetPriority(static_cast<cudaStream_t>(stream->native_handle()), &high) == cudaSuccess);
    REQUIRE(cudaStreamGetPriority(static_cast<cudaStream_t>(other->native_handle()), &low) == cudaSuccess);
    REQUIRE(high < low);
    const auto scratch = gpu::cuda_stream(stream.get(), "test").scratch();
    REQUIRE(scratch.size() == gpu::CudaStream::kScratchBytes);
    std::vector<std::byte> counters(gpu::CudaStream::kCounterBytes, std::byte{1});
    copy(*stream, counters.data(), scratch.data(), counters.size());
    stream->synchronize(soon());
    REQUIRE(std::all_of(counters.begin(), counters.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST_CASE("arguments stay as written until the stream has read them", "[cuda_device][ring]") {
  // Each lap writes a word into the ring and has the stream copy it out; some 40 MiB go through 4 MiB of ring.
  constexpr std::uint64_t kLaps = 320;
  const auto device = make_cuda_device();
  const auto stream = device->create_stream("s");
  auto& ring = gpu::cuda_stream(stream.get(), "test").params();
  const auto near = device->allocate(kLaps * 8);
  for (std::uint64_t lap = 0; lap < kLaps; ++lap) {
    const auto words = ring.take_array<std::uint64_t>(16 * KiB);
    REQUIRE(reinterpret_cast<std::uintptr_t>(words.data()) % 16 == 0);
    words.front() = lap;
    words.back() = lap;
    if (lap % 16 == 0) delay(*stream, 300);
    copy(*stream, near->data() + lap * 8, &words.back(), 8);
  }
  std::vector<std::uint64_t> seen(kLaps);
  copy(*stream, seen.data(), near->data(), kLaps * 8);
  stream->synchronize(soon());
  for (std::uint64_t lap = 0; lap < kLaps; ++lap) REQUIRE(seen[lap] == lap);
  REQUIRE(code_of([&] { return ring.take(ring.largest() + 1); }) == Errc::out_of_capacity);
  REQUIRE_NOTHROW(ring.take(ring.largest()));
}

TEST_CASE("a device outlives its owner as long as something of it is in use", "[cuda_device]") {
  auto device = make_cuda_device();
  const auto buffer = device->allocate(4096);
  const auto pinned = device->allocate_pinned(4096);
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  device.reset();
  copy(*stream, buffer->data(), pinned->data(), 4096);
  stream->record(*event);
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(event->state() == Event::State::done);
}
