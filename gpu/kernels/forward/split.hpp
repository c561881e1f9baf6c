#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/forward/forward.hpp"

/// How the two split kernels are launched: the one that leaves near rows to `attend`, and the one that attends them.
namespace sluice::gpu {

struct SplitLaunch {
  dim3 grid;               ///< clusters of grid.x thread blocks
  std::uint32_t bytes = 0;  ///< of shared memory of a block
  std::uint32_t room = 0;   ///< for candidates of a head
};

void launch_split_attend(const AttendVariant& variant, const SplitLaunch& launch, const ForwardMemory& memory,
                         const ForwardScratch& scratch, const ForwardLayer& layer);
/// Loads them on the current device, whose blocks have `most_shared` bytes of shared memory; how much of it a launch of
/// clusters of so many blocks may give, 0 if it cannot run any.
[[nodiscard]] std::uint32_t load_split_attend_kernels(std::uint32_t most_shared, std::uint32_t blocks);

}  // namespace sluice::gpu
