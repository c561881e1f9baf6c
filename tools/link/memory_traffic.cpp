#include "tools/link/memory_traffic.hpp"

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "tools/link/memory_load.hpp"

namespace sluice::tools {
namespace {

/// More than any device's caches hold.
constexpr std::uint64_t kBytes = 256 * MiB;

/// Also if it was never recorded.
bool passed(const gpu::EventHandle& event) {
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  gpu::check(status, "watch the memory load");
  return true;
}

}  // namespace

/// On a stream named as near attention's is, for its priority.
MemoryTraffic::MemoryTraffic(gpu::CudaDevice& device)
    : thread_blocks_(device.multiprocessors()),
      memory_(device.allocate(kBytes)),
      moved_(device.allocate_pinned(sizeof(std::uint64_t))),
      stream_(device.create_queue("device")) {
  load_memory_load_kernels();
  for (gpu::EventHandle& end : ends_) end = gpu::make_event(cudaEventDisableTiming);
}

void MemoryTraffic::renew() {
  const cudaStream_t stream = stream_->handle();
  for (const gpu::EventHandle& end : ends_) {
    if (!passed(end)) continue;
    launch_memory_load(memory_->data(), memory_->bytes(), kSlice_us, reinterpret_cast<std::uint64_t*>(moved_->data()),
                       thread_blocks_, stream);
    gpu::check(cudaEventRecord(end.get(), stream), "time the memory load");
  }
}

bool MemoryTraffic::running() const {
  return !std::all_of(ends_.begin(), ends_.end(), [](const gpu::EventHandle& end) { return passed(end); });
}

}  // namespace sluice::tools
