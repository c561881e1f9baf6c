#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::gpu {

/// Keeps the stream busy for `microseconds`, at most a second: how tests move work against other work.
void launch_delay(std::uint32_t microseconds, cudaStream_t stream);

/// Writes `value` to `word`, pinned host memory, once everything before it in the stream is visible to the host. For
/// where the driver has no stream memory operations.
void launch_signal(std::uint64_t* word, std::uint64_t value, cudaStream_t stream);

void load_signal_kernels();

}  // namespace sluice::gpu
