// How fast the kernels are against what they have to reach. Hidden, because other GPUs and links have other rates:
// test_gpu_backend "[rate]" runs it.

#include <algorithm>
#include <array>
#include <vector>

#include "gpu/kernels/gather.hpp"
#include "gpu/kernels/signal.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

/// Device time in microseconds of one call of `enqueue`, out of `calls` in a row; the best of five rounds. All calls
/// are in the queue before the first one starts.
template <class Enqueue>
double best_us(GpuUnderTest& under_test, std::uint32_t calls, const Enqueue& enqueue) {
  const auto events = std::array{gpu_device()->create_event(), gpu_device()->create_event()};
  double best = 1e9;
  for (int round = 0; round < 6; ++round) {
    gpu::launch_delay(1'000, under_test.handle());
    under_test.stream()->record(*events[0]);
    for (std::uint32_t i = 0; i < calls; ++i) enqueue(i);
    under_test.stream()->record(*events[1]);
    under_test.finish();
    const std::chrono::duration<double, std::micro> took = events[1]->time() - events[0]->time();
    if (round > 0) best = std::min(best, took.count() / calls);
  }
  return best;
}

std::vector<float> normal(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random.normal());
  return values;
}

}  // namespace

TEST_CASE("page scores come at the rate of HBM", "[.][gpu][rate]") {
  constexpr std::uint32_t kHeads = 8, kPages = 8'192, kLayers = 8, kGroup = 4, kDim = 128;
  constexpr std::uint64_t kDigestBytes = 2 * kDim * 2;
  const AttentionShape shape{.layers = 1, .q_heads = kHeads * kGroup, .kv_heads = kHeads, .head_dim = kDim};
  GpuUnderTest under_test;
  std::vector<std::byte> bits(kHeads * kPages * kDigestBytes);  // bf16 below 4 in magnitude
  Random random(1);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::byte>(random.below(i % 2 == 0 ? 256 : 64));
  std::vector<std::uint32_t> order(kPages);
  for (std::uint32_t i = 0; i < kPages; ++i) order[i] = i * 5'003 % kPages;
  const auto frames = under_test.on_device(std::span<const std::uint32_t>(order));
  const auto q = under_test.on_device(std::span<const float>(normal(kHeads * kGroup * kDim, 2)));
  const auto out = under_test.on_device(std::span<const float>(std::vector<float>(kHeads * kGroup * kPages)));
  std::vector<std::vector<ScorePagesTask>> layers(kLayers);  // 256 MiB, so that the cache does not hold them
  for (auto& tasks : layers) {
    const auto digests = under_test.on_device(std::span<const std::byte>(bits));
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      tasks.push_back({.q = q.data() + head * kGroup * kDim,
                       .digests = digests.data() + head * kPages * kDigestBytes,
                       .frames = frames.data(),
                       .pages = kPages,
                       .out = out.data() + head * kGroup * kPages});
    }
  }
  const double us = best_us(under_test, kLayers, [&](std::uint32_t i) {
    under_test.backend().score_pages(layers[i], shape, DType::bf16, under_test.stream());
  });
  WARN("score_pages, 8 x 8,192 pages: " << us << " us, " << static_cast<double>(bits.size()) / us * 1e-3 << " GB/s");
  REQUIRE(us <= 12.0);
}

TEST_CASE("top-k of 32 rows takes a few microseconds", "[.][gpu][rate]") {
  GpuUnderTest under_test;
  constexpr std::uint32_t kRows = 32, kCount = 8'192;
  const auto values = under_test.on_device(std::span<const float>(normal(kRows * kCount, 3)));
  for (const std::uint32_t k : {16u, 250u}) {
    std::vector<TopKTask> tasks;
    for (std::uint32_t row = 0; row < kRows; ++row) {
      tasks.push_back(
          {.values = values.subspan(row * kCount, kCount), .k = k, .out = under_test.array<std::uint32_t>(k).data()});
    }
    const double us =
        best_us(under_test, 50, [&](std::uint32_t) { under_test.backend().top_k(tasks, under_test.stream()); });
    WARN("top_k, 32 rows of 8,192, k = " << k << ": " << us << " us");
    REQUIRE(us <= 8.0);
  }
}

TEST_CASE("the gather kernel fills the link", "[.][gpu][rate]") {
  constexpr std::uint64_t kBytes = 48 * MiB;
  for (const std::uint64_t block : {4 * KiB, 8 * KiB, 16 * KiB, 64 * KiB}) {
    GpuUnderTest under_test;
    const auto host = under_test.array<std::byte>(kBytes);
    const auto device = under_test.on_device(std::span<const std::byte>(host));
    const auto count = static_cast<std::uint32_t>(kBytes / block);
    for (const bool to_device : {true, false}) {
      const auto copies = under_test.array<Copy>(count);
      for (std::uint32_t i = 0; i < count; ++i) {
        std::byte* const far = host.data() + std::uint64_t{i} * 5'003 % count * block;
        std::byte* const near = device.data() + i * block;
        copies[i] = {.to = to_device ? near : far, .from = to_device ? far : near, .bytes = block};
      }
      const double us = best_us(under_test, 1, [&](std::uint32_t) {
        gpu::launch_gather(copies.data(), count, 16, 512, under_test.handle());
      });
      const double gbps = static_cast<double>(kBytes) / us * 1e-3;
      WARN("gather, 16 thread blocks, " << block / KiB << " KiB, " << (to_device ? "to" : "from")
                                        << " the device: " << gbps << " GB/s");
      if (to_device && block >= 8 * KiB) REQUIRE(gbps >= 50.0);
    }
  }
}

}  // namespace sluice::test
