#include <algorithm>
#include <string>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/stages/cluster_items.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "sluice/step/carver.hpp"
#include "tools/stages/cuda_stages.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

std::uint64_t pages_of(const ClusterTask& task) {
  if (task.count == 0) return 0;
  const std::uint32_t page_tokens = task.kv.layout.page_tokens;
  return (std::uint64_t{task.first} + task.count - 1) / page_tokens - task.first / page_tokens + 1;
}

bool same_kernels(const ClusterTask& a, const ClusterTask& b) {
  return a.kv.layout.dtype == b.kv.layout.dtype && a.kv.layout.head_dim == b.kv.layout.head_dim;
}

/// Tasks from the first on that go into one launch: of one type, as many as travel by value and as their page tables
/// have room for.
std::size_t launchable(std::span<const ClusterTask> tasks, std::uint64_t most_pages) {
  std::uint64_t pages = 0;
  std::size_t count = 0;
  while (count < std::min(tasks.size(), TaskArray<ClusterItem>::kInline) && same_kernels(tasks[count], tasks[0])) {
    pages += pages_of(tasks[count]);
    if (pages > most_pages) break;
    ++count;
  }
  return count;
}

void check_task(const ClusterTask& task, std::uint64_t most_pages) {
  const PageLayout& layout = task.kv.layout;
  check_supported("cluster", {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = layout.head_dim}, layout.near());
  check_tuned("cluster", layout.head_dim, "cluster on the CPU");
  if (task.count != 0 && (task.clusters == 0 || task.clusters > task.count || task.iterations == 0)) {
    throw Error(Errc::invalid_argument, "cluster: " + std::to_string(task.clusters) + " clusters of " +
                                            std::to_string(task.count) + " keys in " + std::to_string(task.iterations) +
                                            " iterations; ask for 1 to as many as there are keys, and 1 iteration or "
                                            "more");
  }
  if (pages_of(task) > most_pages) {
    throw Error(Errc::out_of_capacity, "cluster: " + std::to_string(pages_of(task)) + " pages are more than the " +
                                           std::to_string(most_pages) + " that a launch can name; use larger pages");
  }
}

void launch(std::span<const ClusterTask> tasks, CudaStream& stream) {
  std::uint64_t pages = 0;
  for (const ClusterTask& task : tasks) pages += pages_of(task);
  if (pages == 0) return;
  std::uint32_t* frames = stream.params().take_array<std::uint32_t>(pages).data();
  TaskArray<ClusterItem> items;
  ClusterExtent extent;
  for (const ClusterTask& task : tasks) {
    if (task.count == 0) continue;
    Carver scratch(task.scratch);
    ClusterItem& item = items.inlined[items.count++];
    item = cluster_item(task, scratch);
    item.frames = frames;
    frames = std::copy_n(task.kv.frames + task.first / task.kv.layout.page_tokens, pages_of(task), frames);
    extent.cover(item);
  }
  const PageLayout& layout = tasks.front().kv.layout;
  launch_cluster(items, extent, {.dtype = layout.near().dtype, .head_dim = layout.head_dim, .scaled = layout.scaled()},
                 stream.handle());
}

}  // namespace

void CudaStages::cluster(std::span<const ClusterTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "cluster");
  const std::uint64_t most_pages = queue.params().largest() / sizeof(std::uint32_t);
  for (const ClusterTask& task : tasks) check_task(task, most_pages);
  while (!tasks.empty()) {
    const std::size_t count = launchable(tasks, most_pages);
    launch(tasks.first(count), queue);
    tasks = tasks.subspan(count);
  }
}

std::uint64_t CudaStages::cluster_scratch_bytes(const ClusterTask& task) const {
  Carver scratch(nullptr);
  (void)cluster_item(task, scratch);
  return scratch.used();
}

}  // namespace sluice::tools
