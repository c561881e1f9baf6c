#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sluice/device.hpp"

namespace sluice::gpu {

/// Copies `count` blocks between host memory (pinned or registered) and device memory, in any direction, by `ctas`
/// thread blocks of `threads` threads that load and store directly. `copies` is in memory that kernels read and must
/// stay unchanged until the stream has passed the kernel. Blocks whose two addresses are multiples of 16 go at the
/// link's rate; others byte by byte. The blocks of one call must not overlap.
void launch_gather(const Copy* copies, std::uint32_t count, std::uint32_t ctas, std::uint32_t threads,
                   cudaStream_t stream);

void load_gather_kernels();

}  // namespace sluice::gpu
