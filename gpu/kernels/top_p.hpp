#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/backend.hpp"

namespace sluice::gpu {

/// A TopPTask as the kernel wants it.
struct TopPRow {
  const float* values = nullptr;
  std::uint32_t* mask = nullptr;
  std::uint32_t* kept = nullptr;  ///< may be null
  std::uint32_t count = 0;
  float p = 1.f;
};

/// One launch for all rows, one thread block each, or if rows are long and the device has clusters, one cluster each.
void launch_top_p(const TaskArray<TopPRow>& rows, bool clusters, cudaStream_t stream);

/// Asks for as much shared memory as the current device has.
void load_top_p_kernels();

/// The same by thread block clusters that hold their rows on chip, for rows of up to `longest_top_p_of_clusters`.
/// @param longest  count of the longest row
void launch_top_p_clusters(const TaskArray<TopPRow>& rows, std::uint32_t longest, cudaStream_t stream);
[[nodiscard]] std::uint32_t longest_top_p_of_clusters() noexcept;

/// False if the kernels were compiled for devices without clusters; they are not to be launched then.
[[nodiscard]] bool load_top_p_cluster_kernels();

}  // namespace sluice::gpu
