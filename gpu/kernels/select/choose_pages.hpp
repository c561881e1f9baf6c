#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// Pages of a multiple of 8 tokens, up to 32 query heads in the group.
struct ChoosePagesShape {
  std::uint32_t page_tokens = 0;
  std::uint32_t group = 0;
  float softcap = 0.f;
  std::uint32_t multiprocessors = 0;
};

/// Two kernels, one after the other, for all tasks, of which none has more than `most_pages` pages.
void launch_choose_pages(const TaskArray<ChoosePagesTask>& tasks, std::uint32_t most_pages,
                         const ChoosePagesShape& shape, cudaStream_t stream);
void load_choose_pages_kernels();

}  // namespace sluice::gpu
