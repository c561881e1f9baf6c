#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <string>

#include "sluice/error.hpp"

namespace sluice::gpu {

/// "out of memory (cudaErrorMemoryAllocation)"
[[nodiscard]] inline std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

/// Throws what a failed call of the CUDA runtime means, and clears the runtime's own memory of it, so that the
/// next call does not report it again. An allocation that does not fit is out_of_capacity, everything else device.
/// `what` says what was attempted, as in "pin 8 GiB of host memory".
inline void check(cudaError_t status, const char* what, std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();
  throw Error(status == cudaErrorMemoryAllocation ? Errc::out_of_capacity : Errc::device,
              std::string("CUDA: cannot ") + what + ": " + describe(status), where);
}

}  // namespace sluice::gpu
