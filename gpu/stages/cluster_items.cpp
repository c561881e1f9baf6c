#include "gpu/stages/cluster_items.hpp"

#include <algorithm>

#include "gpu/kernels/cluster/cluster.hpp"
#include "sluice/step/carver.hpp"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

/// Keys of a chunk of the counting sort. More chunks are done at once; each costs a counter per cluster.
constexpr std::uint32_t kLeastChunk = 512;
constexpr std::uint32_t kMostChunks = 128;

}  // namespace

ClusterItem cluster_item(const ClusterTask& task, Carver& scratch) {
  const PageLayout& layout = task.kv.layout;
  const std::uint64_t chunk = std::max<std::uint64_t>(kLeastChunk, div_up(div_up(task.count, kMostChunks), 32) * 32);
  const auto chunks = static_cast<std::uint32_t>(div_up(task.count, chunk));
  return {.base = task.kv.base,
          .frames = nullptr,
          .centroids_out = task.centroids,
          .assignment_out = task.assignment,
          .members_out = task.members,
          .starts_out = task.starts,
          .first = task.first,
          .skip = layout.page_tokens == 0 ? 0 : task.first % layout.page_tokens,
          .count = task.count,
          .clusters = task.clusters,
          .iterations = task.iterations,
          .page_tokens = layout.page_tokens,
          .chunk_keys = static_cast<std::uint32_t>(chunk),
          .chunks = chunks,
          .seed = task.seed,
          .keys = scratch.take<std::byte>(task.count * layout.near().row_bytes()),
          .terms = scratch.take<std::byte>(task.clusters * 2 * layout.near().row_bytes()),
          .centroids = scratch.take<float>(std::uint64_t{task.clusters} * layout.head_dim),
          .half_norms = scratch.take<float>(task.clusters),
          .assignment = scratch.take<std::uint32_t>(task.count),
          .members = scratch.take<std::uint32_t>(task.count),
          .offsets = scratch.take<std::uint32_t>(std::uint64_t{task.clusters} * chunks),
          .starts = scratch.take<std::uint32_t>(std::uint64_t{task.clusters} + 1),
          .changed = scratch.take<std::uint32_t>(task.iterations)};
}

}  // namespace sluice::gpu
