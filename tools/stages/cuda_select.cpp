// Scores, and what is kept by them.

#include <algorithm>
#include <string>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/select/choose_clusters.hpp"
#include "gpu/kernels/select/choose_pages.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "gpu/kernels/select/top_p.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "tools/stages/cuda_stages.hpp"
#include "tools/stages/launches.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

void CudaStages::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                             Stream* stream) {
  if (tasks.empty()) return;
  check_supported("score_pages", shape, {.head_dim = shape.head_dim, .dtype = digest_dtype});
  CudaStream& cuda = cuda_stream(stream, "score_pages");
  const ScoreShape score{.dtype = digest_dtype,
                         .group = shape.group(),
                         .head_dim = shape.head_dim,
                         .multiprocessors = device_.multiprocessors()};
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_score_pages(array, score, cuda.handle()); });
}

void CudaStages::top_k(std::span<const TopKTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_k");
  TaskArray<TopKRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_k(rows, device_.limits().longest_top_k, cuda.handle());
    rows.count = 0;
  };
  for (const TopKTask& task : tasks) {
    const auto count = static_cast<std::uint32_t>(task.values.size());
    const std::uint32_t k = std::min(task.k, count);
    if (k == 0) continue;
    rows.inlined[rows.count++] = {.values = task.values.data(), .out = task.out, .count = count, .k = k};
    if (rows.count == TaskArray<TopKRow>::kInline) launch();
  }
  launch();
}

void CudaStages::score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                            Stream* stream) {
  if (tasks.empty()) return;
  check_supported("score_int4", shape, layout);
  CudaStream& cuda = cuda_stream(stream, "score_int4");
  const ScoreInt4Shape score{.layout = CodeLayout(layout, tasks.front().bits),
                             .dtype = layout.dtype,
                             .group = shape.group(),
                             .scale = shape.score_scale(),
                             .multiprocessors = device_.multiprocessors()};
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_score_int4(array, score, cuda.handle()); });
}

void CudaStages::top_p(std::span<const TopPTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_p");
  TaskArray<TopPRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_p(rows, device_.limits().longest_top_p, cuda.handle());
    rows.count = 0;
  };
  for (const TopPTask& task : tasks) {
    const auto count = static_cast<std::uint32_t>(task.values.size());
    const std::uint32_t end = std::min(task.end, count);
    rows.inlined[rows.count++] = {.values = task.values.data(),
                                  .mask = task.mask,
                                  .kept = task.count,
                                  .count = count,
                                  .begin = std::min(task.begin, end),
                                  .end = end,
                                  .most = task.most,
                                  .p = task.p,
                                  .softcap = task.softcap};
    if (rows.count == TaskArray<TopPRow>::kInline) launch();
  }
  launch();
}

void CudaStages::choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
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
                                   .multiprocessors = device_.multiprocessors()};
  for_each_launch(tasks, cuda.params(),
                  [&](const auto& array) { launch_choose_clusters(array, most, choice, cuda.handle()); });
}

std::uint64_t CudaStages::choose_clusters_scratch_bytes(const ChooseClustersTask& task,
                                                        const AttentionShape& shape) const {
  return task.clusters == 0 ? 0 : shape.group() * ClusterRoom::of(task).words() * sizeof(std::uint32_t);
}

void CudaStages::choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                              const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("choose_pages", shape, layout.near());
  std::uint32_t most = 0;
  for (const ChoosePagesTask& task : tasks) most = std::max(most, task.pages);
  CudaStream& cuda = cuda_stream(stream, "choose_pages");
  const ChoosePagesShape choice{.page_tokens = layout.page_tokens,
                                .group = shape.group(),
                                .softcap = shape.softcap,
                                .multiprocessors = device_.multiprocessors()};
  for_each_launch(tasks, cuda.params(),
                  [&](const auto& array) { launch_choose_pages(array, most, choice, cuda.handle()); });
}

}  // namespace sluice::tools
