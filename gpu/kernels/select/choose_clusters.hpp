#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/step/int4.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// head_dim 64 or 128, up to 32 query heads in the group.
struct ChooseClustersShape {
  CodeLayout layout;
  std::uint32_t group = 0;
  float scale = 0.f;  ///< AttentionShape::score_scale
  float softcap = 0.f;
  std::uint32_t multiprocessors = 0;
};

/// The clusters of a task that its kernels can put in order: with 32 tokens each, 4M tokens. They are sorted in runs of
/// 16,384, each of which is looked up in all others.
inline constexpr std::uint32_t kMostClusters = 131'072;

/// What the kernels of a query head tell each other. Words of 32 bits, a multiple of 32 of them.
struct ClusterRoom {
  std::uint32_t values = 0;    ///< scores of clusters; then of tokens, as ChooseClustersTask::scored counts them
  std::uint32_t clusters = 0;  ///< their order, and where in the list of tokens each begins: one more

  [[nodiscard]] static constexpr ClusterRoom of(const ChooseClustersTask& task) noexcept {
    return {.values = task.clusters < task.scored() ? task.scored() : task.clusters, .clusters = task.clusters};
  }
  [[nodiscard]] constexpr std::uint64_t words() const noexcept {
    return (std::uint64_t{values} + 2 * clusters + 1 + 31) / 32 * 32;
  }
};

/// Four kernels, one after the other, or five where runs are merged, for all tasks, of which none has more than
/// `most_clusters` clusters.
void launch_choose_clusters(const TaskArray<ChooseClustersTask>& tasks, std::uint32_t most_clusters,
                            const ChooseClustersShape& shape, cudaStream_t stream);
void load_choose_clusters_kernels();

/// Its parts, in rank_clusters.cu and fit_clusters.cu.
void launch_rank_clusters(const TaskArray<ChooseClustersTask>& tasks, std::uint32_t most_clusters,
                          const ChooseClustersShape& shape, cudaStream_t stream);
void launch_fit_clusters(const TaskArray<ChooseClustersTask>& tasks, const ChooseClustersShape& shape,
                         cudaStream_t stream);
void load_rank_clusters_kernels();
void load_fit_clusters_kernels();

}  // namespace sluice::gpu
