#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/task_array.hpp"
#include "tools/stages/dense_tasks.hpp"

namespace sluice::tools {

/// Strided rows [tokens, heads, head_dim] of any type and alignment to dense float32. One launch.
void launch_to_f32(const gpu::TaskArray<ToF32Task>& tasks, cudaStream_t stream);

void load_convert_kernels();

}  // namespace sluice::tools
