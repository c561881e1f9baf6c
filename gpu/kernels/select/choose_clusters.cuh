#pragma once

#include "gpu/kernels/select/choose_clusters.hpp"

/// What the kernels of a choice among clusters have in common.
namespace sluice::gpu::choose_clusters {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kAll = 0xffff'ffffu;

/// The memory of a query head of a task, see ClusterRoom.
struct HeadMemory {
  float* values;
  std::uint32_t* order;   ///< [clusters]
  std::uint32_t* begins;  ///< [clusters + 1]
};

__device__ __forceinline__ HeadMemory memory_of(const ChooseClustersTask& task, std::uint32_t head) {
  const ClusterRoom room = ClusterRoom::of(task);
  auto* const words = reinterpret_cast<std::uint32_t*>(task.scratch) + head * room.words();
  return {.values = reinterpret_cast<float*>(words),
          .order = words + room.values,
          .begins = words + room.values + room.clusters};
}

}  // namespace sluice::gpu::choose_clusters
