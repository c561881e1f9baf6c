#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "sluice/error.hpp"

namespace sluice::tools::cuda {

/// Throws unless a call of the CUDA runtime succeeded. `what` says what was attempted.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // or the next innocent call reports it
  throw Error(Errc::device, std::string("CUDA: cannot ") + what + ": " + cudaGetErrorString(status) + " (" +
                                cudaGetErrorName(status) + ")");
}

}  // namespace sluice::tools::cuda
