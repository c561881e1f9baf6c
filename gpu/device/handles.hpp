#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "gpu/device/cuda_error.hpp"

namespace sluice::gpu {

// Owners of CUDA objects. Their destructors ignore errors: either the object is gone with its context, which every
// later call reports, or there is nothing left to do about it.

struct DestroyStream {
  void operator()(cudaStream_t stream) const noexcept { (void)cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const noexcept { (void)cudaEventDestroy(event); }
};
/// Waits for the device, as cudaFree does: no place for it but teardown.
struct FreeDevice {
  void operator()(std::byte* memory) const noexcept { (void)cudaFree(memory); }
};
struct FreePinned {
  void operator()(std::byte* memory) const noexcept { (void)cudaFreeHost(memory); }
};

using StreamHandle = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using EventHandle = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
using DeviceMemory = std::unique_ptr<std::byte, FreeDevice>;
using PinnedMemory = std::unique_ptr<std::byte, FreePinned>;

/// `flags` as cudaEventCreateWithFlags takes them.
[[nodiscard]] inline EventHandle make_event(unsigned flags) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags), "create an event");
  return EventHandle(event);
}

/// Not ordered with the default stream. Lower numbers go first; see cudaDeviceGetStreamPriorityRange.
[[nodiscard]] inline StreamHandle make_stream(int priority) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority), "create a stream");
  return StreamHandle(stream);
}

[[nodiscard]] inline DeviceMemory make_device_memory(std::uint64_t bytes, const char* what) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), what);
  return DeviceMemory(static_cast<std::byte*>(memory));
}

/// Readable and writable by every device under the same address. Not zeroed.
[[nodiscard]] inline PinnedMemory make_pinned_memory(std::uint64_t bytes, const char* what) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what);
  return PinnedMemory(static_cast<std::byte*>(memory));
}

}  // namespace sluice::gpu
