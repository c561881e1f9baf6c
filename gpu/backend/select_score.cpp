// Verbs that score pages, and the largest of the scores.

#include <algorithm>

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"
#include "gpu/kernels/index/digest.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::gpu {

void Backend::digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("digest", layout.near());
  CudaStream& cuda = cuda_stream(stream, "digest");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_digest(array, kind, layout, cuda.handle()); });
}

void Backend::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                          Stream* stream) {
  if (tasks.empty()) return;
  check_supported("score_pages", shape, {.head_dim = shape.head_dim, .dtype = digest_dtype});
  CudaStream& cuda = cuda_stream(stream, "score_pages");
  const ScoreShape score{
      .dtype = digest_dtype, .group = shape.group(), .head_dim = shape.head_dim, .multiprocessors = multiprocessors_};
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_score_pages(array, score, cuda.handle()); });
}

void Backend::top_k(std::span<const TopKTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_k");
  TaskArray<TopKRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_k(rows, limits_.longest_top_k, cuda.handle());
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

}  // namespace sluice::gpu
