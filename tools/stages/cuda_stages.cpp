#include "tools/stages/cuda_stages.hpp"

#include "gpu/device/current_device.hpp"
#include "gpu/stages/shapes.hpp"
#include "tools/stages/append.hpp"
#include "tools/stages/convert.hpp"
#include "tools/stages/copy_items.hpp"
#include "tools/stages/launches.hpp"
#include "tools/stages/merge.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

CudaStages::CudaStages(gpu::CudaDevice& device) : device_(device) {
  const CurrentDevice current(device.ordinal());
  load_append_kernels();
  load_convert_kernels();
  load_copy_items_kernel();
  load_merge_kernels();
}

std::vector<std::string> CudaStages::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return gpu::unsupported_reasons(shape, layout);
}

void CudaStages::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("append", layout);
  for (const AppendTask& task : tasks) check_tensor_type("append", task.dtype);
  CudaStream& cuda = cuda_stream(stream, "append");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_append(array, layout, cuda.handle()); });
}

void CudaStages::to_f32(std::span<const ToF32Task> tasks, Stream* stream) {
  if (tasks.empty()) return;
  for (const ToF32Task& task : tasks) check_tensor_type("to_f32", task.in.dtype);
  CudaStream& cuda = cuda_stream(stream, "to_f32");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_to_f32(array, cuda.handle()); });
}

std::shared_ptr<Stages> cuda_stages_of(Device& device) {
  auto* const cuda = dynamic_cast<gpu::CudaDevice*>(&device);
  return cuda == nullptr ? nullptr : std::make_shared<CudaStages>(*cuda);
}

}  // namespace sluice::tools
