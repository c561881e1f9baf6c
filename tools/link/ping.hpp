#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::tools {

/// A kernel that raises `out` to 1, 2, ... `rounds`, each time waiting until `in` has followed; both pinned and zero
/// at the start. Gives up after `timeout_us`, at most ten seconds. Writes the rounds that it completed to `*done`.
void launch_ping(std::uint64_t* out, const std::uint64_t* in, std::uint32_t rounds, std::uint32_t timeout_us,
                 std::uint64_t* done, cudaStream_t stream);

}  // namespace sluice::tools
