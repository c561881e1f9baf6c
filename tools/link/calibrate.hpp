#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tools/link/bench.hpp"
#include "tools/link/calibrate_transfers.hpp"

namespace sluice::tools {

/// What a calibration measures: these block sizes, and for each of them these counts as far as kCalibratedBytes allow.
/// Times run along straight lines where nothing but the count changes, so a path needs few large counts; but at small
/// ones its start, its calls and its bytes take turns as what limits it.
inline constexpr std::array<std::uint64_t, 9> kCalibratedBlockBytes{512,      4 * KiB,   8 * KiB,   16 * KiB, 32 * KiB,
                                                                    64 * KiB, 128 * KiB, 512 * KiB, 2 * MiB};
inline constexpr std::array<std::uint32_t, 6> kCalibratedBlocks{2, 4, 16, 64, 512, 4096};
inline constexpr std::uint64_t kCalibratedBytes = 32 * MiB;
/// Once a path takes this long for a count, larger ones follow from the line.
inline constexpr double kStraight_us = 1000.0;

/// Rate of the gather kernel by its thread blocks.
struct GatherRate {
  std::uint32_t gather_blocks = 0;
  double gbps = 0.0;
};
[[nodiscard]] std::vector<GatherRate> sweep_gather_blocks(TransferBench& bench, bool to_device,
                                                          std::uint64_t block_bytes, int samples);
/// The fewest that reach this share of the best: more would only take multiprocessors from attention.
[[nodiscard]] std::uint32_t fewest_gather_blocks(const std::vector<GatherRate>& rates, double share = 0.98);

}  // namespace sluice::tools
