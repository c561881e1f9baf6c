#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/task_array.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// One launch for all tasks. Pages of bf16, f16 or fp8_e4m3, head_dim a multiple of 8 up to 256; pages and digests are
/// 16-byte aligned.
void launch_digest(const TaskArray<DigestTask>& tasks, DigestKind kind, const PageLayout& layout, cudaStream_t stream);

void load_digest_kernels();

}  // namespace sluice::gpu
