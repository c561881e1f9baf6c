// Verbs that estimate attention by copies of keys in codes, and keep what is heavy (Twilight).

#include <algorithm>

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/select/top_p.hpp"

namespace sluice::gpu {

void Backend::make_codes(std::span<const CodesTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("make_codes", layout.near());
  CudaStream& cuda = cuda_stream(stream, "make_codes");
  const std::uint32_t bits = tasks.front().bits;
  for_each_launch(tasks, cuda.params(),
                  [&](const auto& array) { launch_make_codes(array, layout, bits, cuda.handle()); });
}

void Backend::score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                         Stream* stream) {
  if (tasks.empty()) return;
  check_supported("score_int4", shape, layout);
  CudaStream& cuda = cuda_stream(stream, "score_int4");
  const ScoreInt4Shape score{.layout = CodeLayout(layout, tasks.front().bits),
                             .dtype = layout.dtype,
                             .group = shape.group(),
                             .scale = shape.score_scale(),
                             .multiprocessors = multiprocessors_};
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_score_int4(array, score, cuda.handle()); });
}

void Backend::top_p(std::span<const TopPTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_p");
  TaskArray<TopPRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_p(rows, limits_.longest_top_p, cuda.handle());
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

}  // namespace sluice::gpu
