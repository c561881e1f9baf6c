#pragma once

#include <cuda_runtime_api.h>

#include "tools/llama/cuda/check.hpp"

namespace sluice::tools::cuda {

/// Loads one kernel; see load_kernels.
template <class... Args>
void load(void (*kernel)(Args...)) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
        "load the model's kernels; is this build for another GPU?");
}

/// Those of likeliest.cu and matvec.cu.
void load_likeliest();
void load_matvec();

}  // namespace sluice::tools::cuda
