#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/task_array.hpp"
#include "gpu/tuning.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::gpu {

/// What the verbs of gpu::Backend have in common.

/// See Backend::unsupported_reasons.
[[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout);

/// @throws Error{Errc::unsupported} naming the verb and the reasons, if there are any.
void check_supported(const char* verb, const AttentionShape& shape, const PageLayout& layout);
/// Likewise, for a verb that takes no shape.
void check_supported(const char* verb, const PageLayout& layout);

/// Of verbs that have kernels for TunedHeadDims only.
/// @throws Error{Errc::unsupported} naming the verb, the head_dim and the remedy.
void check_tuned(const char* verb, std::uint32_t head_dim, const char* remedy);

/// Of types that verbs read and write but pages: no fp8_e4m3, whose scales only pages have.
/// @throws Error{Errc::unsupported} naming the verb and the type.
void check_tensor_type(const char* verb, DType type);

/// launch(TaskArray) for as many tasks at a time as one launch takes, one launch as a rule.
template <class Task, class Launch>
void for_each_launch(std::span<const Task> tasks, ParamRing& params, const Launch& launch) {
  const std::size_t most = params.largest() / sizeof(Task);
  while (!tasks.empty()) {
    TaskArray<Task> array;
    array.count = static_cast<std::uint32_t>(std::min(tasks.size(), most));
    Task* to = array.inlined;
    if (array.count > TaskArray<Task>::kInline) {
      to = params.take_array<Task>(array.count).data();
      array.queued = to;
    }
    std::copy_n(tasks.begin(), array.count, to);
    launch(array);
    tasks = tasks.subspan(array.count);
  }
}

}  // namespace sluice::gpu
