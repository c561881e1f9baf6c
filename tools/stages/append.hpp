#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/page.hpp"
#include "tools/stages/dense_tasks.hpp"

namespace sluice::tools {

/// One launch for all tasks. Rows of any type and alignment to pages of bf16 or f16; head_dim is a multiple of 8, pages
/// are 16-byte aligned.
void launch_append(const gpu::TaskArray<AppendTask>& tasks, const PageLayout& layout, cudaStream_t stream);

void load_append_kernels();

}  // namespace sluice::tools
