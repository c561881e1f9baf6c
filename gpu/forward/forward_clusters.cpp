// Clusters of keys in a forward's memory: how they are made, and what rows choose of them.
#include "gpu/forward/forward_clusters.hpp"

#include <algorithm>
#include <string>

#include "gpu/device/current_device.hpp"
#include "gpu/forward/forward_verbs.hpp"
#include "gpu/kernels/select/choose_clusters.hpp"
#include "gpu/stages/cluster_items.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

/// Of one KV head: the first `clusters` of the clustering, whose tasks' other pointers are null.
ClusterTask task_of(const ForwardMemory& m, const ForwardClustering& clustering) {
  return {.kv = {.layout = m.far_layout},
          .first = clustering.first,
          .count = clustering.count,
          .clusters = clustering.clusters,
          .iterations = clustering.iterations,
          .seed = clustering.first};
}

std::uint64_t scratch_of(const ForwardMemory& m, const ForwardClustering& clustering) {
  Carver carver(nullptr);
  (void)cluster_item(task_of(m, clustering), carver);
  return carver.used();
}

/// What any clustering needs at most.
std::uint64_t most_scratch(const ForwardMemory& m) {
  constexpr std::uint32_t kMostIterations = 100;  // See ClusterOptions.
  // Chunks of the counting sort are whole warps: of fewer keys there may be a few more of them.
  constexpr std::uint64_t kMoreChunks = 16;
  return scratch_of(m, {.count = m.largest.max_tokens, .clusters = m.max_clusters, .iterations = kMostIterations}) +
         kMoreChunks * m.max_clusters * sizeof(std::uint32_t);
}

/// Clusterings on their way to one launch: as many as travel by value, and as there is scratch memory for.
class Launches {
 public:
  Launches(const ForwardMemory& memory, const ForwardScratch& scratch, cudaStream_t stream)
      : memory_(memory), scratch_(scratch), stream_(stream) {}

  void add(const ForwardMemory& in, const ForwardClustering& clustering, std::uint32_t plane) {
    const std::uint64_t bytes = scratch_of(memory_, clustering);
    if (items_.count == TaskArray<ClusterItem>::kInline || used_ + bytes > scratch_.clustering_bytes) launch();
    ClusterTask task = task_of(memory_, clustering);
    const std::uint64_t at = clustering.first_cluster;
    task.kv.base = memory_.far_block(plane, 0);
    task.centroids = memory_.centroids_of(clustering.slot, plane) + at * memory_.shape.head_dim;
    task.members = memory_.cluster_members_of(clustering.slot, plane) + clustering.first;
    task.starts = memory_.cluster_starts_of(clustering.slot, plane) + at;
    Carver carver(scratch_.clustering + used_);
    used_ += bytes;
    ClusterItem& item = items_.inlined[items_.count++];
    item = cluster_item(task, carver);
    item.frames = in.list_of(clustering.list) + clustering.first / memory_.layout.page_tokens;
    extent_.cover(item);
  }
  void launch() {
    if (items_.count == 0) return;
    launch_cluster(
        items_, extent_,
        {.dtype = memory_.layout.dtype, .head_dim = memory_.shape.head_dim, .scaled = memory_.far_layout.scaled()},
        stream_);
    items_.count = 0;
    used_ = 0;
    extent_ = {};
  }

 private:
  const ForwardMemory& memory_;
  const ForwardScratch& scratch_;
  cudaStream_t stream_;
  TaskArray<ClusterItem> items_;
  ClusterExtent extent_;
  std::uint64_t used_ = 0;  ///< bytes of scratch memory
};

}  // namespace

void check_clusters(const ForwardMemory& memory) {
  const char* const remedy = "let the CPU choose: leave int4 out of the policy";
  check_tuned("clusters", memory.shape.head_dim, remedy);
  if (memory.max_clusters > kMostClusters)
    throw Error(Errc::unsupported, "clusters: max_clusters is " + std::to_string(memory.max_clusters) +
                                       "; GPU kernels order up to " + std::to_string(kMostClusters) +
                                       " of a KV head; make larger ones (clusters:size=), or shorter sequences");
}

void place_clusters(const ForwardMemory& rows, Carver& carver, ForwardScratch& scratch) {
  constexpr std::uint64_t kEnough = 64 * MiB;
  const std::uint32_t heads = rows.largest.decode_rows * rows.shape.kv_heads;
  // What is attended anyway and not in the list, and samples of the list, which are a third of it at most: see
  // ClusterOptions.
  const ClusterRoom room{.values = rows.largest.max_tokens + rows.largest.max_tokens / 2 + 64,
                         .clusters = rows.max_clusters};
  scratch.cluster_tasks = carver.take<ChooseClustersTask>(heads);
  scratch.cluster_words = room.words();
  scratch.cluster_room =
      carver.take<std::byte>(std::uint64_t{heads} * rows.shape.group() * room.words() * sizeof(float));
  const std::uint64_t most = most_scratch(rows);
  scratch.clustering_bytes = std::max(most, std::min(kEnough, most * TaskArray<ClusterItem>::kInline));
  scratch.clustering = carver.take<std::byte>(scratch.clustering_bytes);
}

void ForwardVerbs::cluster(const ForwardMemory& memory, std::span<const ForwardClustering> clusterings, void* stream) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  Launches launches(memory, scratch, static_cast<cudaStream_t>(stream));
  for (const ForwardClustering& clustering : clusterings) {
    if (clustering.count == 0) continue;
    for (std::uint32_t layer = 0; layer < memory.shape.layers; ++layer) {
      if (!memory.clusters_in(layer, clustering)) continue;
      const ForwardMemory in = memory.in(layer);
      for (std::uint32_t head = 0; head < memory.shape.kv_heads; ++head)
        launches.add(in, clustering, in.plane(layer, head));
    }
  }
  launches.launch();
}

void ForwardVerbs::choose_clusters(const ForwardMemory& memory, const ForwardScratch& scratch,
                                   const ForwardLayer& layer) const {
  TaskArray<ChooseClustersTask> tasks;
  tasks.queued = scratch.cluster_tasks;
  tasks.count = memory.bucket.decode_rows * memory.shape.kv_heads;
  launch_choose_clusters(tasks, std::min(memory.max_clusters, memory.bucket.max_tokens),
                         {.layout = memory.code_layout(),
                          .group = memory.shape.group(),
                          .scale = memory.shape.score_scale(),
                          .softcap = memory.shape.softcap,
                          .multiprocessors = multiprocessors_},
                         static_cast<cudaStream_t>(layer.stream));
}

}  // namespace sluice::gpu
