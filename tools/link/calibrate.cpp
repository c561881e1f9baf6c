#include "tools/link/calibrate.hpp"

#include <algorithm>

namespace sluice::tools {
namespace {

/// More than the host's caches hold, and twice the largest batch, so that blocks can be scattered.
constexpr std::uint64_t kBufferBytes = 128 * MiB;
constexpr std::uint64_t kMostVerified = 4 * MiB;
constexpr std::uint64_t kPage = 16 * KiB;  // what the cache moves by default
constexpr std::array<TransferPath, 4> kPaths{TransferPath::copy_engine, TransferPath::batch, TransferPath::gather,
                                             TransferPath::staged};
constexpr std::array<std::uint32_t, 9> kGatherBlocks{1, 2, 4, 8, 12, 16, 32, 64, 132};
constexpr TransferEffort kEffort{.samples = 5, .enough_us = 2000.0};
constexpr int kGatherSamples = 3;
/// Beside other work more thread blocks gain more, but at its expense.
constexpr double kBusyShare = 0.95;
constexpr std::uint32_t kMostBusyGatherBlocks = 16;

/// The staged path copies to the device only.
bool goes(TransferPath path, bool to_device) { return to_device || path != TransferPath::staged; }

std::uint32_t most_blocks(const TransferBench& bench, std::uint64_t block_bytes, std::uint64_t bytes) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes / block_bytes, bench.most_blocks(block_bytes)));
}

void verify(TransferBench& bench) {
  for (const bool to_device : {true, false}) {
    for (const TransferPath path : kPaths) {
      if (!goes(path, to_device)) continue;
      for (const std::uint64_t block_bytes : kCalibratedBlockBytes)
        bench.verify({.choice = {.path = path},
                      .to_device = to_device,
                      .block_bytes = block_bytes,
                      .blocks = std::clamp(most_blocks(bench, block_bytes, kMostVerified), 2u, 64u)});
    }
  }
}

/// All paths, count by count, each as long as it is not yet on its straight line.
void measure(TransferBench& bench, TransferLoad load, bool to_device, std::uint64_t block_bytes,
             TransferProfile& profile) {
  std::vector<TransferCase> rivals;
  for (const TransferPath path : kPaths) {
    if (goes(path, to_device))
      rivals.push_back(
          {.choice = {.path = path,
                      .load = load,
                      .gather_blocks = load == TransferLoad::busy ? profile.busy_gather_blocks : profile.gather_blocks},
           .to_device = to_device,
           .block_bytes = block_bytes});
  }
  const std::uint32_t most = most_blocks(bench, block_bytes, kCalibratedBytes);
  std::uint32_t last = 0;
  for (const std::uint32_t count : kCalibratedBlocks) {
    const std::uint32_t blocks = std::min(count, most);
    if (blocks <= last || rivals.empty()) break;
    last = blocks;
    for (TransferCase& rival : rivals) rival.blocks = blocks;
    const std::vector<TransferTiming> timings = bench.landed(rivals, kEffort);
    std::vector<TransferCase> left;
    for (std::size_t i = 0; i < rivals.size(); ++i) {
      profile.samples.push_back({.path = rivals[i].choice.path,
                                 .load = load,
                                 .to_device = to_device,
                                 .block_bytes = block_bytes,
                                 .blocks = blocks,
                                 .host_us = timings[i].host_us,
                                 .device_us = timings[i].device_us});
      if (timings[i].device_us < kStraight_us) left.push_back(rivals[i]);
    }
    rivals = std::move(left);
  }
}

void measure(TransferBench& bench, TransferLoad load, TransferProfile& profile) {
  for (const bool to_device : {true, false}) {
    for (const std::uint64_t block_bytes : kCalibratedBlockBytes) measure(bench, load, to_device, block_bytes, profile);
  }
}

/// Whether a kernel of one stream runs beside that of another.
bool kernels_overlap(TransferBench& bench) {
  const TransferCase small{.choice = {.path = TransferPath::gather}, .block_bytes = kPage, .blocks = 16};
  return bench.landed(small, 1).beside_load;
}

}  // namespace

std::vector<GatherRate> sweep_gather_blocks(TransferBench& bench, bool to_device, std::uint64_t block_bytes,
                                            int samples) {
  std::vector<GatherRate> rates;
  const std::uint32_t blocks = most_blocks(bench, block_bytes, kCalibratedBytes);
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

std::uint32_t fewest_gather_blocks(const std::vector<GatherRate>& rates, double share) {
  double best = 0.0;
  for (const GatherRate& rate : rates) best = std::max(best, rate.gbps);
  const auto first =
      std::find_if(rates.begin(), rates.end(), [&](const GatherRate& rate) { return rate.gbps >= share * best; });
  return first == rates.end() ? TransferProfile{}.gather_blocks : first->gather_blocks;
}

TransferProfile calibrate_transfers(Device& any) {
  gpu::CudaDevice& device = gpu::cuda_device(any, "calibrate_transfers");
  TransferBench bench(device, kBufferBytes);
  TransferProfile profile;
  verify(bench);
  profile.gather_blocks = fewest_gather_blocks(sweep_gather_blocks(bench, true, kPage, kGatherSamples));
  profile.busy_gather_blocks = profile.gather_blocks;
  measure(bench, TransferLoad::idle, profile);
  MemoryTraffic traffic(device);
  bench.run_beside(&traffic);
  if (!kernels_overlap(bench)) return profile;
  std::vector<GatherRate> rates = sweep_gather_blocks(bench, true, kPage, kGatherSamples);
  std::erase_if(rates, [](const GatherRate& rate) { return rate.gather_blocks > kMostBusyGatherBlocks; });
  profile.busy_gather_blocks = fewest_gather_blocks(rates, kBusyShare);
  // Not fewer than are built in: a step's copies meet other work than this one's, and with 12 instead of 16 steps in
  // `stream` placement took a third longer, whatever the sweep said.
  profile.busy_gather_blocks = std::max(profile.busy_gather_blocks, TransferProfile{}.busy_gather_blocks);
  profile.gather_blocks = std::max(profile.gather_blocks, profile.busy_gather_blocks);
  measure(bench, TransferLoad::busy, profile);
  return profile;
}

}  // namespace sluice::tools
