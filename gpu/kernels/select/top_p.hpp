#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/select_verbs.hpp"

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

/// One launch for all rows, one thread block each, or one cluster each if they are long, but not longer than
/// `most_of_clusters`.
void launch_top_p(const TaskArray<TopPRow>& rows, std::uint32_t most_of_clusters, cudaStream_t stream);

/// The same for `count` rows that the device has described, none longer than `longest`.
void launch_top_p(const TopPRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_of_clusters,
                  cudaStream_t stream);

/// Asks for as much shared memory as the current device has.
void load_top_p_kernels();

/// The same by thread block clusters that hold their rows on chip.
/// @param longest  count of the longest row, at most what `load_top_p_cluster_kernels` said
void launch_top_p_clusters(const TaskArray<TopPRow>& rows, std::uint32_t longest, cudaStream_t stream);

/// The longest row that clusters of the current device hold; 0 if it has none.
[[nodiscard]] std::uint32_t load_top_p_cluster_kernels();

}  // namespace sluice::gpu
