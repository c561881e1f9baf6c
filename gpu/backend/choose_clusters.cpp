// The choice among clusters of keys (Tactic).

#include <algorithm>
#include <string>

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"
#include "gpu/kernels/select/choose_clusters.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {

void Backend::choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                              const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("choose_clusters", shape, layout.near());
  check_tuned("choose_clusters", shape.head_dim, "choose on the CPU");
  std::uint32_t most = 0;
  for (const ChooseClustersTask& task : tasks) most = std::max(most, task.clusters);
  if (most > kMostClusters)
    throw Error(Errc::unsupported, "choose_clusters: " + std::to_string(most) + " clusters; GPU kernels order up to " +
                                       std::to_string(kMostClusters) + "; make larger ones");
  CudaStream& cuda = cuda_stream(stream, "choose_clusters");
  const ChooseClustersShape choice{.layout = CodeLayout(layout),
                                   .group = shape.group(),
                                   .scale = shape.score_scale(),
                                   .softcap = shape.softcap,
                                   .multiprocessors = multiprocessors_};
  for_each_launch(tasks, cuda.params(),
                  [&](const auto& array) { launch_choose_clusters(array, most, choice, cuda.handle()); });
}

std::uint64_t Backend::choose_clusters_scratch_bytes(const ChooseClustersTask& task,
                                                     const AttentionShape& shape) const {
  return task.clusters == 0 ? 0 : shape.group() * ClusterRoom::of(task).words() * sizeof(std::uint32_t);
}

}  // namespace sluice::gpu
