#include "gpu/kernels/transfer/gather.hpp"

#include <algorithm>
#include <new>
#include <vector>

#include "gpu/kernels/transfer/signal.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

/// Scattered blocks with gaps between them, in two layouts of the same size.
struct Blocks {
  std::vector<std::uint64_t> from;
  std::vector<std::uint64_t> to;
  std::vector<std::uint64_t> bytes;
  std::uint64_t size = 0;

  /// `step`: what addresses and sizes are multiples of.
  Blocks(std::uint32_t count, std::uint64_t largest, std::uint64_t step, std::uint64_t seed) {
    Random random(seed);
    for (std::uint32_t i = 0; i < count; ++i) {
      bytes.push_back((1 + random.below(static_cast<std::uint32_t>(largest / step))) * step);
      from.push_back(size);
      size += bytes.back() + step * random.below(3);
    }
    to.resize(count);
    std::uint64_t at = 0;
    for (std::uint32_t i = count; i-- > 0;) {  // the other way round
      to[i] = at;
      at += bytes[i];
    }
  }
};

}  // namespace

TEST_CASE("the gather kernel copies exactly the blocks, in every direction", "[gpu][gather]") {
  const auto to_device = GENERATE(0, 1);
  const auto count = GENERATE(1u, 3u, 64u, 1'500u);
  const auto step = GENERATE(1u, 16u);  // 1: not aligned
  const auto largest = GENERATE(64u, 20'000u);
  const auto ctas = GENERATE(1u, 16u);
  CAPTURE(to_device, count, step, largest, ctas);
  GpuUnderTest under_test;
  const Blocks blocks(count, largest, step, count + largest);
  std::vector<std::byte> data(blocks.size);
  Random random(1);
  for (std::byte& x : data) x = static_cast<std::byte>(random.below(256));
  const std::vector<std::byte> blank(blocks.size, std::byte{0x5a});
  const auto device = under_test.on_device(std::span<const std::byte>(to_device != 0 ? blank : data));
  const auto host = under_test.copy_of(to_device != 0 ? data : blank);
  const auto from = to_device != 0 ? host : device;
  const auto to = to_device != 0 ? device : host;

  std::vector<std::byte> expected = blank;
  const auto copies = under_test.array<Copy>(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    copies[i] = {.to = to.data() + blocks.to[i], .from = from.data() + blocks.from[i], .bytes = blocks.bytes[i]};
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(blocks.from[i]), blocks.bytes[i],
                expected.begin() + static_cast<std::ptrdiff_t>(blocks.to[i]));
  }
  gpu::launch_gather(copies.data(), count, ctas, 512, under_test.handle());
  REQUIRE(under_test.from_device(std::span<const std::byte>(to)) == expected);
}

TEST_CASE("the gather kernel takes blocks of no bytes and no blocks", "[gpu][gather]") {
  GpuUnderTest under_test;
  const auto copies = under_test.array<Copy>(40);
  REQUIRE_NOTHROW(gpu::launch_gather(copies.data(), 0, 4, 512, under_test.handle()));
  REQUIRE_NOTHROW(gpu::launch_gather(copies.data(), 40, 4, 100, under_test.handle()));
  REQUIRE_NOTHROW(under_test.finish());
}

TEST_CASE("a signal kernel comes after what was enqueued before it", "[gpu][signal]") {
  GpuUnderTest under_test;
  Flag* const flag = new (under_test.memory(sizeof(Flag))) Flag;
  const Clock::time_point begin = Clock::now();
  gpu::launch_delay(20'000, under_test.handle());
  gpu::launch_signal(flag->word(), Flag::reached_word(7), under_test.handle());
  const Deadline deadline = soon();
  while (flag->state(7) == Flag::State::pending) REQUIRE(RunClock::now() < deadline);
  REQUIRE(flag->state(7) == Flag::State::reached);
  REQUIRE(Clock::now() - begin >= std::chrono::milliseconds(19));
  under_test.finish();
}

}  // namespace sluice::test
