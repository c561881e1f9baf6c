#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// A head_dim of KernelHeadDims, bf16 or f16, up to 32 query heads in the group.
struct ScoreShape {
  DType dtype = DType::bf16;  ///< of digests
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t multiprocessors = 0;
};

/// One launch for all tasks.
void launch_score_pages(const TaskArray<ScorePagesTask>& tasks, const ScoreShape& shape, cudaStream_t stream);
/// The same for `count` tasks that the device has described, none of more than `longest` pages.
void launch_score_pages(const ScorePagesTask* tasks, std::uint32_t count, std::uint32_t longest,
                        const ScoreShape& shape, cudaStream_t stream);

void load_score_kernels();

}  // namespace sluice::gpu
