#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// A TopPTask as the kernel wants it.
struct TopPRow {
  const float* values = nullptr;
  std::uint32_t* mask = nullptr;
  std::uint32_t* kept = nullptr;  ///< may be null
  std::uint32_t count = 0;
  std::uint32_t begin = 0;  ///< values [begin, end) are to be chosen from, the others are attended anyway
  std::uint32_t end = 0;    ///< from `begin` to `count`
  std::uint32_t most = kNone;  ///< as TopPTask's
  float p = 1.f;
  float softcap = 0.f;  ///< as TopPTask's
};

/// One launch for all rows: held on chip, or read again and again if one is longer than `most_held`, which is what
/// load_top_p_kernels said. A row that is held is cut alike whatever is launched with it.
void launch_top_p(const TaskArray<TopPRow>& rows, std::uint32_t most_held, cudaStream_t stream);

/// The same for `count` rows that the device has described, none longer than `longest`.
void launch_top_p(const TopPRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_held,
                  cudaStream_t stream);

/// Asks for as much shared memory as the current device has; returns the longest row that it holds on chip.
[[nodiscard]] std::uint32_t load_top_p_kernels();

/// @param longest  count of the longest row, at most what load_top_p_held_kernel said
void launch_top_p_held(const TaskArray<TopPRow>& rows, std::uint32_t longest, cudaStream_t stream);
[[nodiscard]] std::uint32_t load_top_p_held_kernel();

}  // namespace sluice::gpu
