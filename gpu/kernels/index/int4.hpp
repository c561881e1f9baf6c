#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/select/foresight.hpp"
#include "gpu/kernels/task_array.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// head_dim 64, 96, 128, 192 or 256, pages of a multiple of 8 tokens, at most 256, up to 32 query heads in the group.
struct ScoreInt4Shape {
  CodeLayout layout;          ///< of 3 or 4 bits: as the kernel that is launched
  DType dtype = DType::bf16;  ///< of the pages that tails lie in
  std::uint32_t group = 0;
  float scale = 0.f;    ///< AttentionShape::score_scale
  float softcap = 0.f;  ///< of what is drawn by, see AttentionShape
  std::uint32_t multiprocessors = 0;
};

/// One launch for all tasks. Copies are 16-byte aligned.
void launch_score_int4(const TaskArray<ScoreInt4Task>& tasks, const ScoreInt4Shape& shape, cudaStream_t stream);
/// The same for `count` tasks that the device has described: without tails, none longer than `longest`, with lists if
/// `lists` says that some may have them. Without lists, candidates are found, too, if there are bounds.
void launch_score_int4(const ScoreInt4Task* tasks, std::uint32_t count, std::uint32_t longest, bool lists,
                       const Foresight& foresight, const ScoreInt4Shape& shape, cudaStream_t stream);

void load_score_int4_kernels();

}  // namespace sluice::gpu
