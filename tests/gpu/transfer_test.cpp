// Every path moves exactly the bytes it was given, in either direction.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device/cuda_device.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::gpu;

namespace {

constexpr std::array kPaths{TransferPath::automatic, TransferPath::copy_engine, TransferPath::batch,
                            TransferPath::gather, TransferPath::staged};

struct Layout {
  const char* name;
  std::uint64_t blocks;
  std::uint64_t least_bytes;
  std::uint64_t most_bytes;
  std::uint64_t alignment;  ///< of sizes and gaps
  bool gaps;                ///< between blocks; without, all are adjacent
};
constexpr std::array<Layout, 8> kLayouts{{{"aligned", 300, 16 * KiB, 16 * KiB, 4096, true},
                                          {"odd sizes", 300, 1, 9001, 1, true},
                                          {"mixed, one much longer", 40, 16, 3 * MiB, 16, true},
                                          {"one block", 1, 100'000, 100'000, 16, true},
                                          {"one byte", 1, 1, 1, 1, true},
                                          {"5000 blocks", 5000, 2 * KiB, 2 * KiB, 16, true},
                                          {"adjacent", 100, 8 * KiB, 8 * KiB, 16, false},
                                          {"more than a segment of descriptors", 50'000, 32, 48, 16, true}}};

/// Places of the blocks on both sides, in unlike orders.
std::vector<std::pair<std::uint64_t, std::uint64_t>> offsets(const std::vector<std::uint64_t>& sizes,
                                                             const Layout& layout, test::Random& random) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places(sizes.size());
  std::uint64_t at = 0;
  for (const std::size_t i : order) {
    places[i].first = at;
    at += sizes[i] + (layout.gaps ? layout.alignment : 0);
  }
  for (std::size_t left = order.size(); layout.gaps && left > 1; --left)
    std::swap(order[left - 1], order[random.below(static_cast<std::uint32_t>(left))]);
  at = 0;
  for (const std::size_t i : order) {
    places[i].second = at;
    at += sizes[i] + (layout.gaps ? 2 * layout.alignment : 0);
  }
  return places;
}

std::vector<std::uint64_t> block_sizes(const Layout& layout, test::Random& random) {
  std::vector<std::uint64_t> sizes(layout.blocks);
  const std::uint64_t choices = (layout.most_bytes - layout.least_bytes) / layout.alignment + 1;
  // Mostly short: few of the many sizes are near the longest.
  for (auto& bytes : sizes)
    bytes =
        layout.least_bytes + random.next() % (random.below(8) == 0 ? choices : div_up(choices, 16)) * layout.alignment;
  return sizes;
}

/// Copies by the path and holds every byte of the target, also between the blocks, against what it has to be.
void run(CudaDevice& device, TransferPath path, bool to_device, const Layout& layout) {
  test::Random random(layout.blocks * 31 + (to_device ? 1 : 0));
  const auto sizes = block_sizes(layout, random);
  const auto places = offsets(sizes, layout, random);
  const std::uint64_t bytes =
      std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}) + layout.blocks * 2 * layout.alignment;
  const auto stream = device.create_queue("test");
  const auto near = device.allocate(bytes);
  const auto host = device.allocate_pinned(bytes);   // the host's side of the batch
  const auto other = device.allocate_pinned(bytes);  // the device's side, as the test sees it
  for (std::uint64_t i = 0; i < bytes; ++i) {
    host->data()[i] = static_cast<std::byte>(random.next());
    other->data()[i] = static_cast<std::byte>(random.next());
  }
  std::vector<std::byte> expected(to_device ? other->data() : host->data(),
                                  (to_device ? other->data() : host->data()) + bytes);
  const Copy there{.to = near->data(), .from = other->data(), .bytes = bytes};
  stream->copy(std::span(&there, 1));
  stream->synchronize(deadline_after(std::chrono::seconds(60)));

  std::vector<Copy> batch;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto [from, to] = places[i];
    batch.push_back(to_device ? Copy{.to = near->data() + to, .from = host->data() + from, .bytes = sizes[i]}
                              : Copy{.to = host->data() + to, .from = near->data() + from, .bytes = sizes[i]});
    std::memcpy(expected.data() + to, (to_device ? host : other)->data() + from, sizes[i]);
  }
  stream->copy(batch, {.path = path});
  const Copy back{.to = other->data(), .from = near->data(), .bytes = bytes};
  if (to_device) stream->copy(std::span(&back, 1));
  stream->synchronize(deadline_after(std::chrono::seconds(60)));
  REQUIRE(std::memcmp((to_device ? other : host)->data(), expected.data(), bytes) == 0);
}

}  // namespace

TEST_CASE("every path copies the exact bytes in both directions", "[transfer]") {
  CudaDevice device(CudaDeviceOptions{});
  for (const TransferPath path : kPaths) {
    for (const Layout& layout : kLayouts) {
      for (const bool to_device : {true, false}) {
        CAPTURE(to_string(path), layout.name, to_device);
        run(device, path, to_device, layout);
      }
    }
  }
}

TEST_CASE("a batch takes the path that it was told to, where that is possible", "[transfer]") {
  CudaDevice device(CudaDeviceOptions{});
  const auto stream = device.create_queue("test");
  const auto near = device.allocate(1 * MiB);
  const auto host = device.allocate_pinned(1 * MiB);
  std::vector<std::byte> pageable(1 * MiB);
  const auto path_of = [&](const std::byte* from, std::uint64_t stride, TransferPath path) {
    stream->synchronize(deadline_after(std::chrono::seconds(60)));
    std::vector<Copy> batch;
    for (std::uint64_t i = 0; i < 16; ++i)
      batch.push_back({.to = near->data() + i * stride, .from = from + i * stride, .bytes = 4 * KiB});
    stream->copy(batch, {.path = path});
    return stream->last_path();
  };
  for (const TransferPath path :
       {TransferPath::copy_engine, TransferPath::batch, TransferPath::gather, TransferPath::staged}) {
    CAPTURE(to_string(path));
    REQUIRE(path_of(host->data(), 8 * KiB, path) == path);
    REQUIRE(path_of(host->data(), 4 * KiB, path) == TransferPath::copy_engine);  // one block after all
    REQUIRE(path_of(pageable.data(), 8 * KiB, path) == TransferPath::copy_engine);
  }
  stream->synchronize(deadline_after(std::chrono::seconds(60)));
}

TEST_CASE("a staged copy does not read what the stream has still to wait for", "[transfer]") {
  CudaDevice device(CudaDeviceOptions{});
  if (!device.memory_operations()) return;
  const auto stream = device.create_queue("test");
  const auto near = device.allocate(1 * MiB);
  const auto host = device.allocate_pinned(1 * MiB);
  const auto seen = device.allocate_pinned(1 * MiB);
  const auto flag_memory = device.allocate_pinned(sizeof(Flag));
  auto* const flag = new (flag_memory->data()) Flag;
  std::vector<Copy> batch;
  for (std::uint64_t i = 0; i < 16; ++i)
    batch.push_back({.to = near->data() + i * 8 * KiB, .from = host->data() + i * 8 * KiB, .bytes = 4 * KiB});
  stream->wait(*flag, 1);
  stream->copy(batch, {.path = TransferPath::staged});
  std::memset(host->data(), 0x5a, 1 * MiB);
  flag->signal(1);
  const Copy back{.to = seen->data(), .from = near->data(), .bytes = 1 * MiB};
  stream->copy(std::span(&back, 1));
  stream->synchronize(deadline_after(std::chrono::seconds(60)));
  for (std::uint64_t i = 0; i < 16; ++i) REQUIRE(std::memcmp(seen->data() + i * 8 * KiB, host->data(), 4 * KiB) == 0);
}

TEST_CASE("blocks are not merged across two registrations", "[transfer]") {
  CudaDevice device(CudaDeviceOptions{});
  const auto stream = device.create_queue("test");
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, 64 * KiB)), &std::free);
  std::memset(memory.get(), 0x33, 64 * KiB);
  const auto first = device.register_host({memory.get(), 32 * KiB});
  const auto second = device.register_host({memory.get() + 32 * KiB, 32 * KiB});
  const auto near = device.allocate(64 * KiB);
  const auto seen = device.allocate_pinned(64 * KiB);
  std::vector<Copy> batch;
  for (std::uint64_t i = 0; i < 16; ++i)
    batch.push_back({.to = near->data() + i * 4 * KiB, .from = memory.get() + i * 4 * KiB, .bytes = 4 * KiB});
  stream->copy(batch);
  const Copy back{.to = seen->data(), .from = near->data(), .bytes = 64 * KiB};
  stream->copy(std::span(&back, 1));
  REQUIRE_NOTHROW(stream->synchronize(deadline_after(std::chrono::seconds(60))));
  REQUIRE(std::memcmp(seen->data(), memory.get(), 64 * KiB) == 0);
}

TEST_CASE("copies in the background choose by the busy side of the profile", "[transfer][profile]") {
  auto profile = std::make_shared<TransferProfile>();
  for (const bool to_device : {true, false}) {
    for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
      const auto add = [&](TransferPath path, double us) {
        profile->samples.push_back({.path = path,
                                    .load = load,
                                    .to_device = to_device,
                                    .block_bytes = 4 * KiB,
                                    .blocks = 16,
                                    .device_us = us});
      };
      add(TransferPath::gather, load == TransferLoad::idle ? 10.0 : 30.0);
      add(TransferPath::batch, 20.0);
    }
  }
  CudaDevice device(CudaDeviceOptions{.profile = profile});
  const auto stream = device.create_queue("test");
  const auto near = device.allocate(1 * MiB);
  const auto host = device.allocate_pinned(1 * MiB);
  for (const bool to_device : {true, false}) {
    std::vector<Copy> batch;
    for (std::uint64_t i = 0; i < 16; ++i) {
      std::byte* const there = near->data() + i * 8 * KiB;
      std::byte* const here = host->data() + i * 8 * KiB;
      batch.push_back({.to = to_device ? there : here, .from = to_device ? here : there, .bytes = 4 * KiB});
    }
    CAPTURE(to_device);
    stream->copy(batch);
    REQUIRE(stream->last_path() == TransferPath::gather);
    stream->copy(batch, {.load = TransferLoad::busy});
    REQUIRE(stream->last_path() == TransferPath::batch);
  }
  stream->synchronize(deadline_after(std::chrono::seconds(60)));
}
