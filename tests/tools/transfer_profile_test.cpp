// A transfer profile as a function of load, direction, size and count, and the path that `auto` takes by it.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <tuple>

#include "gpu/device/path_chooser.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tools/link/calibrate.hpp"

using namespace sluice;
using namespace sluice::gpu;
using namespace sluice::tools;

namespace {

constexpr std::array kLoads{TransferLoad::idle, TransferLoad::busy};
constexpr std::array<std::uint32_t, 16> kCounts{2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 128, 256, 1024, 4096};

bool refused(const TransferProfile& profile) {
  try {
    const PathChooser chooser(std::make_shared<const TransferProfile>(profile));
  } catch (const Error& error) {
    return error.code() == Errc::invalid_argument;
  }
  return false;
}

/// A link whose paths cost what they cost on an H200, roughly, with their kinks: the batch call takes another way from
/// 32 KiB on, the gather kernel needs a few blocks to fill the link, the staged path works in segments.
double link_us(TransferPath path, TransferLoad load, std::uint64_t block_bytes, std::uint32_t blocks) {
  const auto n = static_cast<double>(blocks);
  const auto bytes = static_cast<double>(block_bytes);
  const auto us = [](double moved, double gbps) { return moved / gbps * 1e-3; };
  switch (path) {
    case TransferPath::automatic: break;
    case TransferPath::copy_engine: return 4.0 + std::max(2.7 * n, n * (1.2 + us(bytes, 54.5)));
    case TransferPath::batch: return 8.0 + n * (block_bytes < 32 * KiB ? 0.75 + us(bytes, 6.5) : 0.4 + us(bytes, 54.0));
    case TransferPath::gather: {
      const double gbps = load == TransferLoad::busy ? 25.0 : 51.2;
      return 7.0 + std::max({n * us(bytes, gbps), 0.15 * n, 1.5});
    }
    case TransferPath::staged: return 9.0 + us(std::min(n * bytes, 1048576.0), 54.0) + n * (0.05 + us(bytes, 11.0));
  }
  return 0.0;
}

/// What a calibration that errs by up to `error` finds on that link.
TransferProfile calibrated(double error) {
  test::Random random(7);
  TransferProfile profile;
  for (const TransferLoad load : kLoads) {
    for (const TransferPath path :
         {TransferPath::copy_engine, TransferPath::batch, TransferPath::gather, TransferPath::staged}) {
      for (const std::uint64_t block_bytes : kCalibratedBlockBytes) {
        const auto most = static_cast<std::uint32_t>(kCalibratedBytes / block_bytes);
        std::uint32_t last = 0;
        for (const std::uint32_t count : kCalibratedBlocks) {
          const std::uint32_t blocks = std::min(count, most);
          if (blocks <= last) break;
          last = blocks;
          const double us = link_us(path, load, block_bytes, blocks);
          const double wrong = 1.0 + error * (static_cast<double>(random.below(2001)) / 1000.0 - 1.0);
          profile.samples.push_back({.path = path,
                                     .load = load,
                                     .to_device = true,
                                     .block_bytes = block_bytes,
                                     .blocks = blocks,
                                     .host_us = 1.0,
                                     .device_us = us * wrong});
          if (us >= kStraight_us) break;
        }
      }
    }
  }
  return profile;
}

/// Of the best path's rate, at the worst of many sizes and counts on the calibration's grid and off it.
double worst_share(const PathChooser& chooser) {
  double worst = 1.0;
  for (const TransferLoad load : kLoads) {
    for (std::uint64_t bytes = 512; bytes <= 2 * MiB; bytes *= 2) {
      for (const std::uint32_t blocks : kCounts) {
        if (bytes * blocks > 64 * MiB) continue;
        const TransferPath taken = chooser.choose(
            {.load = load, .to_device = true, .may_stage = true, .block_bytes = bytes, .blocks = blocks});
        double best = link_us(TransferPath::copy_engine, load, bytes, blocks);
        for (const TransferPath path : {TransferPath::batch, TransferPath::gather, TransferPath::staged})
          best = std::min(best, link_us(path, load, bytes, blocks));
        const double share = best / link_us(taken, load, bytes, blocks);
        if (share < 0.95)
          UNSCOPED_INFO(to_string(load) << ": " << blocks << " x " << bytes << " by " << to_string(taken) << ", "
                                        << share);
        worst = std::min(worst, share);
      }
    }
  }
  return worst;
}

}  // namespace

TEST_CASE("between its samples a profile follows straight lines, beyond them at most proportion", "[profile]") {
  auto profile = std::make_shared<TransferProfile>();
  const auto add = [&](TransferPath path, std::uint64_t block_bytes, std::uint32_t blocks, double us) {
    profile->samples.push_back(
        {.path = path, .block_bytes = block_bytes, .blocks = blocks, .host_us = 1.0, .device_us = us});
  };
  for (const std::uint32_t blocks : {512u, 8u, 64u}) {  // in any order
    add(TransferPath::copy_engine, 64 * KiB, blocks, 4.0 * blocks);
    add(TransferPath::copy_engine, 4 * KiB, blocks, 2.0 * blocks);
    add(TransferPath::gather, 4 * KiB, blocks, 20.0 + 0.1 * blocks);
    add(TransferPath::gather, 64 * KiB, blocks, 20.0 + 5.0 * blocks);
  }
  add(TransferPath::staged, 4 * KiB, 8, 100.0);
  const PathChooser chooser(profile);
  const auto us = [&](TransferPath path, std::uint64_t block_bytes, std::uint32_t blocks) {
    return chooser.device_us(path, {.to_device = true, .block_bytes = block_bytes, .blocks = blocks});
  };
  REQUIRE(us(TransferPath::copy_engine, 4 * KiB, 64) == Approx(128.0));
  REQUIRE(us(TransferPath::copy_engine, 4 * KiB, 100) == Approx(200.0));
  REQUIRE(us(TransferPath::gather, 4 * KiB, 100) == Approx(30.0));
  REQUIRE(us(TransferPath::gather, 4 * KiB, 16) == Approx(21.6));
  REQUIRE(us(TransferPath::gather, 34 * KiB, 64) == Approx((26.4 + 340.0) / 2));
  REQUIRE(us(TransferPath::copy_engine, 4 * KiB, 4096) == Approx(8192.0));
  REQUIRE(us(TransferPath::gather, 4 * KiB, 4096) == Approx(429.6));
  REQUIRE(us(TransferPath::gather, 4 * KiB, 2) == Approx(20.2));
  REQUIRE(us(TransferPath::gather, 512 * KiB, 64) == Approx(340.0 + (340.0 - 26.4) / 60 * 448).epsilon(0.2));
  REQUIRE(us(TransferPath::gather, 512 * KiB, 64) <= 8 * 340.0);
  REQUIRE(us(TransferPath::copy_engine, 1 * KiB, 64) == Approx(128.0 * (1.0 - 3.0 / 60)));
  REQUIRE(us(TransferPath::staged, 8 * KiB, 16) == Approx(400.0));  // one sample: in proportion
  REQUIRE(std::isinf(us(TransferPath::batch, 4 * KiB, 64)));
  REQUIRE(std::isinf(chooser.device_us(TransferPath::gather, {.to_device = false, .block_bytes = 4096, .blocks = 8})));
  const auto choice = [&](std::uint64_t block_bytes, std::uint32_t blocks) {
    return chooser.choose({.to_device = true, .block_bytes = block_bytes, .blocks = blocks});
  };
  REQUIRE(choice(4 * KiB, 1) == TransferPath::copy_engine);
  REQUIRE(choice(4 * KiB, 8) == TransferPath::copy_engine);
  REQUIRE(choice(4 * KiB, 64) == TransferPath::gather);
  REQUIRE(choice(64 * KiB, 512) == TransferPath::copy_engine);
}

TEST_CASE("a busy device has times of its own, per direction", "[profile]") {
  auto profile = std::make_shared<TransferProfile>();
  const auto add = [&](TransferPath path, TransferLoad load, bool to_device, double us) {
    profile->samples.push_back(
        {.path = path, .load = load, .to_device = to_device, .block_bytes = 4096, .blocks = 8, .device_us = us});
  };
  for (const bool to_device : {true, false}) {
    add(TransferPath::batch, TransferLoad::idle, to_device, 20.0);
    add(TransferPath::gather, TransferLoad::idle, to_device, 10.0);
  }
  add(TransferPath::batch, TransferLoad::busy, true, 22.0);
  add(TransferPath::gather, TransferLoad::busy, true, 40.0);
  profile->gather_blocks = 4;
  profile->busy_gather_blocks = 12;
  const PathChooser chooser(profile);
  const auto choice = [&](TransferLoad load, bool to_device) {
    return chooser.choose({.load = load, .to_device = to_device, .block_bytes = 4096, .blocks = 8});
  };
  REQUIRE(choice(TransferLoad::idle, true) == TransferPath::gather);
  REQUIRE(choice(TransferLoad::busy, true) == TransferPath::batch);
  REQUIRE(choice(TransferLoad::idle, false) == TransferPath::gather);
  REQUIRE(choice(TransferLoad::busy, false) == TransferPath::gather);  // not measured: as idle
  REQUIRE(chooser.gather_blocks(TransferLoad::idle) == 4);
  REQUIRE(chooser.gather_blocks(TransferLoad::busy) == 12);
}

TEST_CASE("a path that only the idle device was measured with is not taken on a busy one", "[profile]") {
  auto profile = std::make_shared<TransferProfile>();
  profile->samples.push_back({.path = TransferPath::gather, .block_bytes = 4096, .blocks = 8, .device_us = 1.0});
  profile->samples.push_back(
      {.path = TransferPath::batch, .load = TransferLoad::busy, .block_bytes = 4096, .blocks = 8, .device_us = 50.0});
  const PathChooser chooser(profile);
  REQUIRE(chooser.choose({.load = TransferLoad::busy, .block_bytes = 4096, .blocks = 8}) == TransferPath::batch);
  REQUIRE(chooser.choose({.load = TransferLoad::idle, .block_bytes = 4096, .blocks = 8}) == TransferPath::gather);
}

TEST_CASE("auto is within 5% of the best path on the calibration's grid and off it", "[profile]") {
  const PathChooser chooser(std::make_shared<const TransferProfile>(calibrated(0.0)));
  REQUIRE(worst_share(chooser) >= 0.95);
}

TEST_CASE("a calibration that errs by 2% costs no more than both its errors and the 5%", "[profile]") {
  const PathChooser chooser(std::make_shared<const TransferProfile>(calibrated(0.02)));
  REQUIRE(worst_share(chooser) >= 0.91);
}

TEST_CASE("the built-in crossovers spare the gather kernel on a busy device where another path keeps its rate",
          "[profile]") {
  const PathChooser chooser(nullptr);
  for (const bool to_device : {true, false}) {
    const auto choice = [&](TransferLoad load, std::uint64_t block_bytes) {
      return chooser.choose({.load = load, .to_device = to_device, .block_bytes = block_bytes, .blocks = 64});
    };
    REQUIRE(choice(TransferLoad::idle, 16 * KiB) == TransferPath::gather);
    REQUIRE(choice(TransferLoad::busy, 16 * KiB) == TransferPath::gather);  // a batch call is slower still
    REQUIRE(choice(TransferLoad::idle, 64 * KiB) == TransferPath::gather);
    REQUIRE(choice(TransferLoad::busy, 64 * KiB) == TransferPath::batch);
  }
}

TEST_CASE("staging is for sources that may be read at once", "[profile]") {
  auto profile = std::make_shared<TransferProfile>();
  for (const auto& [path, us] : {std::pair{TransferPath::staged, 1.0}, std::pair{TransferPath::batch, 9.0}})
    profile->samples.push_back({.path = path, .block_bytes = 4096, .blocks = 8, .device_us = us});
  const PathChooser chooser(profile);
  REQUIRE(chooser.choose({.may_stage = true, .block_bytes = 4096, .blocks = 8}) == TransferPath::staged);
  REQUIRE(chooser.choose({.may_stage = false, .block_bytes = 4096, .blocks = 8}) == TransferPath::batch);
}

TEST_CASE("senseless profiles are refused", "[profile]") {
  const auto of = [](const TransferSample& sample) { return TransferProfile{.samples = {sample}}; };
  const TransferSample good{.path = TransferPath::batch, .block_bytes = 4096, .blocks = 8, .device_us = 1.0};
  REQUIRE_FALSE(refused(of(good)));
  for (auto [path, bytes, blocks, us] :
       {std::tuple{TransferPath::automatic, 4096u, 8u, 1.0}, std::tuple{TransferPath::batch, 0u, 8u, 1.0},
        std::tuple{TransferPath::batch, 4096u, 0u, 1.0}, std::tuple{TransferPath::batch, 4096u, 8u, -1.0},
        std::tuple{TransferPath::batch, 4096u, 8u, std::nan("")}, std::tuple{TransferPath::batch, 4096u, 8u, 1e308}})
    REQUIRE(refused(of({.path = path, .block_bytes = bytes, .blocks = blocks, .device_us = us})));
  TransferSample odd = good;
  odd.load = static_cast<TransferLoad>(2);
  REQUIRE(refused(of(odd)));
  TransferProfile none = of(good);
  none.busy_gather_blocks = 0;
  REQUIRE(refused(none));
}

TEST_CASE("beyond the samples a time stays a time, however far off and however short", "[profile]") {
  const std::uint64_t block_bytes = GENERATE(std::uint64_t{16384}, (std::uint64_t{1} << 63) + 1);
  const double us = GENERATE(10.21e-320, 1.1, kMostTransfer_us);
  CAPTURE(block_bytes, us);
  TransferProfile profile;
  for (const std::uint32_t blocks : {3u, 0xffff'fff1u})
    profile.samples.push_back(
        {.path = TransferPath::gather, .block_bytes = block_bytes, .blocks = blocks, .device_us = us * blocks});
  profile.samples.back().device_us = std::min(profile.samples.back().device_us, kMostTransfer_us);
  profile.samples.front().device_us = std::min(profile.samples.front().device_us, kMostTransfer_us);
  const PathChooser chooser(std::make_shared<const TransferProfile>(profile));
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4096}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    for (const std::uint32_t blocks : {1u, 2u, 100u, 0xffff'ffffu}) {
      CAPTURE(bytes, blocks);
      const double time = chooser.device_us(TransferPath::gather, {.block_bytes = bytes, .blocks = blocks});
      REQUIRE(time >= 0.0);
      REQUIRE(std::isfinite(time));
    }
  }
}
