// Clusters of keys: how they are made, and what rows choose of them.
#include "cpu/forward/forward_layer.hpp"
#include "sluice/step/forward_tasks.hpp"

namespace sluice::cpu {

void cluster(const Host& host, const ForwardMemory& m, const ForwardClustering& clustering) {
  for (std::uint32_t layer = 0; layer < m.shape.layers; ++layer) {
    if (!m.clusters_in(layer, clustering)) continue;
    const ForwardMemory in = m.in(layer);
    for (std::uint32_t head = 0; head < m.shape.kv_heads; ++head) {
      const std::uint32_t plane = in.plane(layer, head);
      const ClusterTask task{
          .kv = {.base = m.far_block(plane, 0), .frames = in.list_of(clustering.list), .layout = m.far_layout},
          .first = clustering.first,
          .count = clustering.count,
          .clusters = clustering.clusters,
          .iterations = clustering.iterations,
          .seed = clustering.first,
          .centroids =
              m.centroids_of(clustering.slot, plane) + std::uint64_t{clustering.first_cluster} * m.shape.head_dim,
          .members = m.cluster_members_of(clustering.slot, plane) + clustering.first,
          .starts = m.cluster_starts_of(clustering.slot, plane) + clustering.first_cluster};
      cluster(host, {&task, 1});
    }
  }
}

void choose_clusters(const Host& host, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    const ChooseClustersTask task = clusters_task(m, row, index, m.plane(layer, head));
    if (task.clusters != 0) choose_clusters(host, {&task, 1}, m.shape, m.layout);
  });
}

}  // namespace sluice::cpu
