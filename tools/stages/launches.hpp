#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/task_array.hpp"

namespace sluice::tools {

/// launch(TaskArray) for as many tasks at a time as one launch takes, one launch as a rule.
template <class Task, class Launch>
void for_each_launch(std::span<const Task> tasks, gpu::ParamRing& params, const Launch& launch) {
  const std::size_t most = params.largest() / sizeof(Task);
  while (!tasks.empty()) {
    gpu::TaskArray<Task> array;
    array.count = static_cast<std::uint32_t>(std::min(tasks.size(), most));
    Task* to = array.inlined;
    if (array.count > gpu::TaskArray<Task>::kInline) {
      to = params.take_array<Task>(array.count).data();
      array.queued = to;
    }
    std::copy_n(tasks.begin(), array.count, to);
    launch(array);
    tasks = tasks.subspan(array.count);
  }
}

}  // namespace sluice::tools
