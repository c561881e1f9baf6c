#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::tools {

/// Keeps the device's memory as busy as attention does: `ctas` thread blocks read and write `bytes` at `data`, 16-byte
/// aligned, again and again for `duration_us`, at most a second. Adds the bytes read and written to `*moved`, in
/// device memory or pinned.
void launch_memory_load(std::byte* data, std::uint64_t bytes, std::uint32_t duration_us, std::uint64_t* moved,
                        std::uint32_t ctas, cudaStream_t stream);

void load_memory_load_kernels();

}  // namespace sluice::tools
