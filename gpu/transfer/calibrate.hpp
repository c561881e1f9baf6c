#pragma once

#include <cstdint>
#include <vector>

#include "gpu/cuda_device.hpp"
#include "gpu/transfer/bench.hpp"
#include "sluice/cuda.hpp"

namespace sluice::gpu {

/// Rate of the gather kernel by its thread blocks.
struct GatherRate {
  std::uint32_t gather_blocks = 0;
  double gbps = 0.0;
};
[[nodiscard]] std::vector<GatherRate> sweep_gather_blocks(TransferBench& bench, bool to_device,
                                                          std::uint64_t block_bytes, int samples);
/// The fewest within 2% of the best: more would only take multiprocessors from attention.
[[nodiscard]] std::uint32_t fewest_gather_blocks(const std::vector<GatherRate>& rates);

/// See calibrate_transfers.
[[nodiscard]] TransferProfile calibrate(CudaDevice& device);
/// The same with buffers that are there already.
[[nodiscard]] TransferProfile calibrate(TransferBench& bench);

}  // namespace sluice::gpu
