#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/attend_tasks.hpp"

namespace sluice::gpu {

/// Strided rows [tokens, heads, head_dim] of any type and alignment to dense float32. One launch.
void launch_to_f32(const TaskArray<ToF32Task>& tasks, cudaStream_t stream);

void load_convert_kernels();

}  // namespace sluice::gpu
