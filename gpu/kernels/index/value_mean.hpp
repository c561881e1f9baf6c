#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/task_array.hpp"
#include "sluice/select_verbs.hpp"

namespace sluice::gpu {

/// One launch for all tasks. Pages of bf16, f16 or fp8_e4m3, head_dim a multiple of 8 up to 256; pages and means are
/// 16-byte aligned.
void launch_mean_values(const TaskArray<ValueMeanTask>& tasks, const PageLayout& layout, cudaStream_t stream);

void load_mean_values_kernels();

}  // namespace sluice::gpu
