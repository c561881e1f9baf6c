// The choice of pages by a progressive share (PSA).

#include "gpu/kernels/select/choose_pages.hpp"

#include <algorithm>

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"

namespace sluice::gpu {

void Backend::choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                           const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("choose_pages", shape, layout.near());
  std::uint32_t most = 0;
  for (const ChoosePagesTask& task : tasks) most = std::max(most, task.pages);
  CudaStream& cuda = cuda_stream(stream, "choose_pages");
  const ChoosePagesShape choice{.page_tokens = layout.page_tokens,
                                .group = shape.group(),
                                .softcap = shape.softcap,
                                .multiprocessors = multiprocessors_};
  for_each_launch(tasks, cuda.params(),
                  [&](const auto& array) { launch_choose_pages(array, most, choice, cuda.handle()); });
}

}  // namespace sluice::gpu
