#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/backend.hpp"

namespace sluice::gpu {

/// One launch for all tasks, a warp per query head. `group` is at most 32.
/// @throws Error{Errc::device} if the launch is refused.
void launch_verify(const TaskArray<ProgressTask>& tasks, std::uint32_t group, cudaStream_t stream);
void load_verify_kernels();

}  // namespace sluice::gpu
