#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// A TopKTask as the kernel wants it.
struct TopKRow {
  const float* values = nullptr;
  std::uint32_t* out = nullptr;
  std::uint32_t count = 0;
  std::uint32_t k = 0;  ///< at most `count`; 0: nothing is written
};

/// One launch for all rows, one thread block each, or one cluster each if they are long, but not longer than
/// `most_of_clusters`.
void launch_top_k(const TaskArray<TopKRow>& rows, std::uint32_t most_of_clusters, cudaStream_t stream);
/// The same for `count` rows that the device has described, none longer than `longest`.
void launch_top_k(const TopKRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_of_clusters,
                  cudaStream_t stream);

/// Asks for as much shared memory as the current device has.
void load_top_k_kernels();

/// The same by thread block clusters that hold their rows on chip.
/// @param longest  count of the longest row, at most what `load_top_k_cluster_kernels` said
void launch_top_k_clusters(const TaskArray<TopKRow>& rows, std::uint32_t longest, cudaStream_t stream);

/// The longest row that clusters of the current device hold; 0 if it has none.
[[nodiscard]] std::uint32_t load_top_k_cluster_kernels();

}  // namespace sluice::gpu
