#include "cpu/machine/host_pool.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/machine/frame_set.hpp"
#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;

namespace {

/// Counts and records registrations; refuses the one with index `refuse_at`.
class FakeDevice final : public Device {
 public:
  struct Range {
    const std::byte* begin;
    std::uint64_t bytes;
  };
  class Held final : public Registration {
   public:
    explicit Held(int& live) : live_(live) { ++live_; }
    ~Held() override { --live_; }

   private:
    int& live_;
  };

  int live = 0;
  std::size_t refuse_at = ~std::size_t{0};
  std::vector<Range> ranges;
  bool touched = true;  ///< every registered byte read as zero, i.e. the memory is there

  std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override {
    if (ranges.size() == refuse_at) throw Error(Errc::device, "refused");
    ranges.push_back({memory.data(), memory.size()});
    touched = touched && std::all_of(memory.begin(), memory.end(), [](std::byte b) { return b == std::byte{0}; });
    return std::make_unique<Held>(live);
  }
  const DeviceInfo& info() const noexcept override { return info_; }
  std::unique_ptr<Buffer> allocate(std::uint64_t) override { throw std::logic_error("not asked for"); }
  std::unique_ptr<Buffer> allocate_pinned(std::uint64_t) override { throw std::logic_error("not asked for"); }
  std::unique_ptr<Stream> create_stream(const std::string&) override { throw std::logic_error("not asked for"); }
  std::unique_ptr<Event> create_event() override { throw std::logic_error("not asked for"); }

 private:
  DeviceInfo info_;
};

const Topology& machine() {
  static const Topology topology;
  return topology;
}

const Workers& workers() {
  static const Workers pool(machine(), {.threads = 3});
  return pool;
}

PageLayout layout(std::uint32_t page_tokens, std::uint32_t head_dim) {
  return {.page_tokens = page_tokens, .head_dim = head_dim, .dtype = DType::bf16};
}

/// 16 KiB pages.
HostPoolOptions pages(std::uint64_t count) { return {.layout = layout(32, 128), .bytes = count * 16 * KiB}; }

Errc code_of(const HostPoolOptions& options, Device& device) {
  try {
    const HostPool pool(options, machine(), workers(), device);
  } catch (const Error& error) {
    return error.code();
  }
  throw std::logic_error("the pool was built");
}

}  // namespace

TEST_CASE("a frame set hands out the smallest member, whatever came back", "[host_pool]") {
  const auto size = GENERATE(1u, 63u, 64u, 65u, 4096u, 4097u, 20'000u);
  CAPTURE(size);
  FrameSet frames(size);
  std::set<std::uint32_t> model;
  for (std::uint32_t i = 0; i < size; ++i) model.insert(model.end(), i);
  std::vector<std::uint32_t> taken;
  std::mt19937 random(7);
  for (std::uint32_t step = 0; step < 3 * size + 100; ++step) {
    REQUIRE(frames.size() == model.size());
    // First mostly taking, then mostly giving back, so that both ends are reached.
    const bool take = taken.empty() || (!model.empty() && random() % 4 < (step < 2 * size ? 3u : 1u));
    if (take) {
      const std::uint32_t frame = frames.take_lowest();
      REQUIRE(frame == *model.begin());
      model.erase(model.begin());
      REQUIRE_FALSE(frames.contains(frame));
      taken.push_back(frame);
    } else {
      std::swap(taken[random() % taken.size()], taken.back());
      frames.insert(taken.back());
      REQUIRE(frames.contains(taken.back()));
      model.insert(taken.back());
      taken.pop_back();
    }
  }
}

TEST_CASE("the pool holds whole pages of zeroed, aligned memory", "[host_pool]") {
  FakeDevice device;
  HostPoolOptions options = pages(200);
  options.bytes += 16 * KiB - 1;  // not enough for one more
  options.huge_pages = GENERATE(HugePages::off, HugePages::transparent);
  const HostPool pool(options, machine(), workers(), device);
  REQUIRE(pool.frames() == 200);
  REQUIRE(pool.free_frames() == 200);
  REQUIRE(pool.layout() == options.layout);
  REQUIRE(pool.frame(3) == pool.base() + 3 * 16 * KiB);
  REQUIRE(reinterpret_cast<std::uintptr_t>(pool.base()) % 4096 == 0);
  REQUIRE(device.touched);
}

TEST_CASE("memory is touched by the cores of its node that may be used", "[host_pool]") {
  const auto threads = [](const Topology& topology, std::uint32_t node) {
    const WorkersOptions options = touching(topology, node);
    REQUIRE(options.numa_node == node);
    return options.threads;
  };
  const Topology two("numa:2 core:4 pu:2");
  for (const std::uint32_t node : {0u, 1u}) REQUIRE(threads(two, node) == 4);
  REQUIRE(threads(two.limited(3), 0) == 3);
  const std::uint32_t some[] = {0, 8, 10};
  REQUIRE(threads(two.of_pus(some), 0) == 1);
  REQUIRE(threads(two.of_pus(some), 1) == 2);
  REQUIRE(threads(two.of_pus(std::span(some).first(1)), 1) == 1);  // None of its own: by those of the other.
  REQUIRE(threads(Topology("core:6 pu:1"), 0) == 6);
  REQUIRE(threads(Topology("pu:1"), 0) == 1);
}

TEST_CASE("memory is touched by all workers at once", "[host_pool]") {
  constexpr std::uint32_t kThreads = 3;
  WorkersOptions options = touching(Topology("core:3 pu:1"), 0);
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::uint32_t> here;
  options.before_body = [&](std::uint32_t thread) {
    std::unique_lock lock(mutex);
    here.insert(thread);
    came.notify_all();
    // Nobody goes on without the others, so that a busy machine does not leave one of them without work.
    (void)came.wait_for(lock, std::chrono::seconds(20), [&] { return here.size() == kThreads; });
  };
  FakeDevice device;
  const HostPool pool(pages(64 * MiB / (16 * KiB)), machine(), Workers(machine(), options), device);
  REQUIRE(here.size() == kThreads);
  REQUIRE(device.touched);
}

TEST_CASE("pages allocated together are the lowest free ones", "[host_pool]") {
  FakeDevice device;
  HostPool pool(pages(8), machine(), workers(), device);
  const auto first = pool.allocate(6);
  for (std::uint32_t i = 0; i < 6; ++i) REQUIRE(first[i] == PageRef{i, 0});
  pool.release(first[4]);
  pool.release(first[1]);
  const auto again = pool.allocate(3);
  REQUIRE(again == std::vector<PageRef>{{1, 1}, {4, 1}, {6, 0}});
  REQUIRE(pool.free_frames() == 1);
  REQUIRE(pool.allocate(0).empty());
}

TEST_CASE("an allocation that does not fit takes nothing", "[host_pool]") {
  FakeDevice device;
  HostPool pool(pages(4), machine(), workers(), device);
  const auto held = pool.allocate(3);
  try {
    (void)pool.allocate(2);
    FAIL("fitted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::out_of_capacity);
  }
  REQUIRE(pool.free_frames() == 1);
  REQUIRE(pool.allocate(1) == std::vector<PageRef>{{3, 0}});
  REQUIRE(pool.free_frames() == 0);
  REQUIRE_THROWS_AS(pool.allocate(1), Error);
}

TEST_CASE("a reference lives from allocation to release and never again", "[host_pool]") {
  FakeDevice device;
  HostPool pool(pages(2), machine(), workers(), device);
  REQUIRE_FALSE(pool.live({0, 0}));  // right generation, not yet in use
  const PageRef old = pool.allocate(1).front();
  REQUIRE(pool.live(old));
  REQUIRE_FALSE(pool.live({old.frame, old.generation + 1}));
  pool.release(old);
  REQUIRE_FALSE(pool.live(old));
  REQUIRE_FALSE(pool.live({old.frame, old.generation + 1}));  // free: its next generation is not out yet

  const PageRef next = pool.allocate(1).front();
  REQUIRE(next.frame == old.frame);
  REQUIRE(next.generation == old.generation + 1);
  REQUIRE(pool.live(next));
  REQUIRE_FALSE(pool.live(old));
}

TEST_CASE("stale, double and foreign releases are refused and change nothing", "[host_pool]") {
  FakeDevice device;
  HostPool pool(pages(3), machine(), workers(), device);
  const PageRef page = pool.allocate(1).front();
  pool.release(page);
  const auto code = [&](PageRef wrong) {
    try {
      pool.release(wrong);
    } catch (const Error& error) {
      return error.code();
    }
    return Errc::io;
  };
  REQUIRE(code(page) == Errc::invalid_argument);
  REQUIRE(code({0, 1}) == Errc::invalid_argument);
  REQUIRE(code({3, 0}) == Errc::invalid_argument);
  REQUIRE(code({kNone, 0}) == Errc::invalid_argument);
  REQUIRE(pool.free_frames() == 3);
  REQUIRE(pool.allocate(1).front() == PageRef{0, 1});
}

TEST_CASE("registrations tile the pool and no page spans two of them", "[host_pool]") {
  // Page sizes that divide an OS page, that are several of them, and that are neither (6 KiB, 3 x 11 x 4).
  const auto shape = GENERATE(layout(4, 64), layout(32, 128), layout(12, 128), layout(3, 11));
  const auto chunk = GENERATE(std::uint64_t{1}, 64 * KiB, 100'000, 16 * GiB);
  const std::uint64_t page_bytes = shape.page_bytes();
  CAPTURE(page_bytes, chunk);
  FakeDevice device;
  {
    const HostPool pool({.layout = shape, .bytes = 1 * MiB, .register_chunk_bytes = chunk}, machine(), workers(),
                        device);
    REQUIRE(device.live == static_cast<int>(device.ranges.size()));
    const std::byte* next = pool.base();
    for (const auto& range : device.ranges) {
      REQUIRE(range.begin == next);
      REQUIRE(range.bytes % page_bytes == 0);
      REQUIRE(reinterpret_cast<std::uintptr_t>(range.begin) % Slab::os_page_bytes() == 0);
      REQUIRE(range.bytes <= std::max(chunk, std::lcm(page_bytes, Slab::os_page_bytes())));
      next += range.bytes;
    }
    REQUIRE(next == pool.base() + pool.frames() * page_bytes);
    REQUIRE(device.touched);
  }
  REQUIRE(device.live == 0);
}

TEST_CASE("a refused registration rolls back those before it", "[host_pool]") {
  const auto refused = GENERATE(0u, 1u, 3u, 7u);
  CAPTURE(refused);
  FakeDevice device;
  device.refuse_at = refused;
  HostPoolOptions options = pages(64);
  options.register_chunk_bytes = 128 * KiB;  // eight pieces
  try {
    const HostPool pool(options, machine(), workers(), device);
    FAIL("built");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::device);
    REQUIRE(std::string(error.what()).find("piece " + std::to_string(refused + 1) + " of 8") != std::string::npos);
    REQUIRE(std::string(error.what()).find("refused") != std::string::npos);
  }
  REQUIRE(device.ranges.size() == refused);
  REQUIRE(device.live == 0);
}

TEST_CASE("a pool that the machine cannot hold is refused before it is touched", "[host_pool]") {
  FakeDevice device;
  const std::uint64_t available = available_memory_bytes();
  REQUIRE(available != kNoLimit);
  const auto options = pages(available / (16 * KiB) + 64 * GiB / (16 * KiB));
  try {
    const HostPool pool(options, machine(), workers(), device);
    FAIL("built");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::out_of_capacity);
    REQUIRE(std::string(error.what()).find(std::to_string(options.bytes)) != std::string::npos);
  }
  REQUIRE(device.ranges.empty());
}

TEST_CASE("options outside their range are named", "[host_pool]") {
  FakeDevice device;
  auto options = pages(1);
  SECTION("no page fits") { options.bytes = 16 * KiB - 1; }
  SECTION("no layout") { options.layout.head_dim = 0; }
  SECTION("no such node") { options.numa_node = machine().numa_nodes(); }
  SECTION("more frames than indices") { options = {.layout = layout(1, 1), .bytes = 16 * GiB}; }
  REQUIRE(code_of(options, device) == Errc::invalid_argument);
  REQUIRE(device.ranges.empty());
}
