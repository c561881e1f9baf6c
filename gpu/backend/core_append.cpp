// Verbs that bring tokens into pages, and rows to float32.

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"
#include "gpu/kernels/index/append.hpp"
#include "gpu/kernels/index/convert.hpp"

namespace sluice::gpu {

void Backend::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("append", layout);
  for (const AppendTask& task : tasks) check_tensor_type("append", task.dtype);
  CudaStream& cuda = cuda_stream(stream, "append");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_append(array, layout, cuda.handle()); });
}

void Backend::to_f32(std::span<const ToF32Task> tasks, Stream* stream) {
  if (tasks.empty()) return;
  for (const ToF32Task& task : tasks) check_tensor_type("to_f32", task.in.dtype);
  CudaStream& cuda = cuda_stream(stream, "to_f32");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_to_f32(array, cuda.handle()); });
}

}  // namespace sluice::gpu
