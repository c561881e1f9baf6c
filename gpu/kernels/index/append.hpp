#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/backend.hpp"

namespace sluice::gpu {

/// One launch for all tasks. Rows of any type and alignment to pages of bf16 or f16; head_dim is a multiple of 8, pages
/// are 16-byte aligned.
void launch_append(const TaskArray<AppendTask>& tasks, const PageLayout& layout, cudaStream_t stream);

/// Tensors that are widened beside, as to_f32 does; an argument of the kernel.
struct WidenedTensors {
  static constexpr std::uint32_t kMost = 8;
  ToF32Task tasks[kMost];
  std::uint32_t count = 0;
};
static_assert(sizeof(TaskArray<AppendTask>) + sizeof(WidenedTensors) + 64 <= 4096, "kernel arguments have 4 KiB");

/// Both in one launch.
void launch_append_and_widen(const TaskArray<AppendTask>& tasks, const PageLayout& layout,
                             const WidenedTensors& widened, cudaStream_t stream);

void load_append_kernels();

}  // namespace sluice::gpu
