// Scores of pages, the largest of any scores, and clusters.

#include <algorithm>
#include <vector>

#include "cpu/stages/k_means.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/shapes.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::cpu {
namespace {

/// Part of one task that one thread does.
struct Slice {
  std::uint32_t task = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

constexpr std::uint32_t kSliceRows = 1024;

/// A stage's tasks, cut into slices of some of their items.
template <class Task>
struct SlicedTasks {
  std::vector<Task> tasks;
  std::vector<Slice> slices;

  /// Each task has size(task) items.
  template <class Size>
  void cut(std::span<const Task> from, const Size& size) {
    tasks.assign(from.begin(), from.end());
    slices.clear();
    for (std::uint32_t task = 0; task < tasks.size(); ++task) {
      const auto items = static_cast<std::uint32_t>(size(tasks[task]));
      for (std::uint32_t begin = 0; begin < items; begin += kSliceRows) {
        slices.push_back({.task = task, .begin = begin, .end = std::min(begin + kSliceRows, items)});
      }
    }
  }
};

template <class Task, class Size>
std::uint64_t total(std::span<const Task> tasks, const Size& size) {
  std::uint64_t sum = 0;
  for (const Task& task : tasks) sum += size(task);
  return sum;
}

}  // namespace

void score_pages(const Host& host, std::span<const ScorePagesTask> tasks, const AttentionShape& shape,
                 DType digest_dtype) {
  if (tasks.empty()) return;
  check("score_pages", shape);
  check_tensor_type("score_pages", digest_dtype);
  const auto pages = [](const ScorePagesTask& task) { return task.pages; };
  const auto lent = Lent<SlicedTasks<ScorePagesTask>>::reused(host.workers);
  lent->cut(tasks, pages);
  const std::uint64_t digest_bytes = std::uint64_t{2} * shape.head_dim * bytes_of(digest_dtype);
  const ElementKernels& kernels = kernels_for(host.kernels, digest_dtype);
  for_each_unit(host.workers, lent->slices.size(), total(tasks, pages) * digest_bytes,
                [all = lent.get(), &kernels, shape](std::uint32_t i) {
                  const Slice& slice = all->slices[i];
                  const ScorePagesTask& task = all->tasks[slice.task];
                  kernels.score_digests({.q = task.q,
                                         .digests = task.digests,
                                         .frames = task.frames + slice.begin,
                                         .count = slice.end - slice.begin,
                                         .group = shape.group(),
                                         .head_dim = shape.head_dim,
                                         .out = task.out + slice.begin,
                                         .out_stride = task.pages});
                });
}

void cluster(const Host& host, std::span<const ClusterTask> tasks) {
  for (const ClusterTask& task : tasks) {
    check("cluster", task.kv.layout);
    check_clusters(task);
  }
  for (const ClusterTask& task : tasks) k_means(host.kernels, task, host.workers);
}

void top_k(const Host& host, std::span<const TopKTask> tasks) {
  const std::uint64_t values = total(tasks, [](const TopKTask& task) { return task.values.size(); });
  for_each_task(host.workers, tasks, values * sizeof(float), [](const TopKTask& task) {
    select_top_k(task.values.data(), static_cast<std::uint32_t>(task.values.size()), task.k, task.out);
  });
}

}  // namespace sluice::cpu
