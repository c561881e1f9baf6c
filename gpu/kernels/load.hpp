#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "gpu/device/cuda_error.hpp"

namespace sluice::gpu {

/// Loads a kernel now, not at its first launch, which would wait for all that spins on the device; with more than 0 it
/// is allowed so many bytes of dynamic shared memory.
/// @param what  for the message: "load the merge kernel"
template <class... Args>
void load_kernel(void (*kernel)(Args...), const char* what, std::size_t shared_bytes = 0) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), what);
  if (shared_bytes == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        what);
}

}  // namespace sluice::gpu
