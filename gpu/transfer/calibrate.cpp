#include "gpu/transfer/calibrate.hpp"

#include <algorithm>
#include <array>

namespace sluice::gpu {
namespace {

/// Twice the largest batch, so that blocks can be scattered.
constexpr std::uint64_t kBufferBytes = 128 * MiB;
constexpr std::uint64_t kMostBytes = 64 * MiB;
constexpr std::uint64_t kMostVerified = 4 * MiB;
constexpr std::array<std::uint64_t, 7> kBlockBytes{4 * KiB,  8 * KiB,   16 * KiB, 32 * KiB,
                                                   64 * KiB, 128 * KiB, 512 * KiB};
constexpr std::array<std::uint32_t, 4> kBlocks{8, 64, 512, 4096};
constexpr std::array<TransferPath, 4> kPaths{TransferPath::copy_engine, TransferPath::batch, TransferPath::gather,
                                             TransferPath::staged};
constexpr std::array<std::uint32_t, 9> kGatherBlocks{1, 2, 4, 8, 12, 16, 32, 64, 132};
constexpr int kSamples = 3;
/// A batch this long varies little; one sample is enough.
constexpr double kLong_us = 2000.0;
constexpr double kNearBest = 0.98;

TransferSample measure(TransferBench& bench, const TransferCase& what) {
  TransferTiming timing = bench.landed(what, 1);
  if (timing.device_us < kLong_us) timing = bench.landed(what, kSamples);
  return {.path = what.choice.path,
          .to_device = what.to_device,
          .block_bytes = what.block_bytes,
          .blocks = what.blocks,
          .host_us = timing.host_us,
          .device_us = timing.device_us};
}

/// One block size on one path in one direction: checked first, then timed for every count.
void measure_counts(TransferBench& bench, TransferCase what, TransferProfile& profile) {
  const auto most = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kMostBytes / what.block_bytes, bench.most_blocks(what.block_bytes)));
  what.blocks = std::clamp<std::uint32_t>(static_cast<std::uint32_t>(kMostVerified / what.block_bytes), 2, 64);
  bench.verify(what);
  std::uint32_t last = 0;
  for (const std::uint32_t blocks : kBlocks) {
    what.blocks = std::min(blocks, most);
    if (what.blocks <= last) continue;
    last = what.blocks;
    profile.samples.push_back(measure(bench, what));
  }
}

}  // namespace

std::vector<GatherRate> sweep_gather_blocks(TransferBench& bench, bool to_device, std::uint64_t block_bytes,
                                            int samples) {
  std::vector<GatherRate> rates;
  const auto blocks =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(kMostBytes / 2 / block_bytes, bench.most_blocks(block_bytes)));
  for (const std::uint32_t gather_blocks : kGatherBlocks) {
    const TransferCase what{.choice = {.path = TransferPath::gather, .gather_blocks = gather_blocks},
                            .to_device = to_device,
                            .block_bytes = block_bytes,
                            .blocks = blocks};
    rates.push_back({.gather_blocks = gather_blocks,
                     .gbps = static_cast<double>(what.bytes()) / bench.landed(what, samples).device_us * 1e-3});
  }
  return rates;
}

std::uint32_t fewest_gather_blocks(const std::vector<GatherRate>& rates) {
  double best = 0.0;
  for (const GatherRate& rate : rates) best = std::max(best, rate.gbps);
  const auto first =
      std::find_if(rates.begin(), rates.end(), [&](const GatherRate& rate) { return rate.gbps >= kNearBest * best; });
  return first == rates.end() ? TransferProfile{}.gather_blocks : first->gather_blocks;
}

TransferProfile calibrate(TransferBench& bench) {
  TransferProfile profile;
  constexpr std::uint64_t kPage = 16 * KiB;  // what the cache moves by default
  profile.gather_blocks = fewest_gather_blocks(sweep_gather_blocks(bench, true, kPage, kSamples));
  for (const bool to_device : {true, false}) {
    for (const TransferPath path : kPaths) {
      if (path == TransferPath::staged && !to_device) continue;
      for (const std::uint64_t block_bytes : kBlockBytes) {
        measure_counts(bench,
                       {.choice = {.path = path, .gather_blocks = profile.gather_blocks},
                        .to_device = to_device,
                        .block_bytes = block_bytes},
                       profile);
      }
    }
  }
  return profile;
}

TransferProfile calibrate(CudaDevice& device) {
  TransferBench bench(device, kBufferBytes);
  return calibrate(bench);
}

}  // namespace sluice::gpu
