#include "gpu/kernels/compiled.hpp"

#include <cuda_runtime_api.h>

#include "gpu/device/cuda_error.hpp"

namespace sluice::gpu {
namespace {

// A kernel's bounds are in its attributes, so that none has to run to say what it was compiled for: of code that was
// assembled for a newer device than it was written for, those do not tell by themselves.
[[maybe_unused]] constexpr int kAny = 128;
[[maybe_unused]] constexpr int kClusters = 256;
[[maybe_unused]] constexpr int kWarpgroups = 512;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SLUICE_COMPILED kWarpgroups
#elif __CUDA_ARCH__ >= 900
#define SLUICE_COMPILED kClusters
#else
#define SLUICE_COMPILED kAny
#endif

__global__ void __launch_bounds__(SLUICE_COMPILED) compiled_kernel() {}

#undef SLUICE_COMPILED

}  // namespace

Compiled compiled_for() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, compiled_kernel), "load a kernel");
  if (attributes.maxThreadsPerBlock >= kWarpgroups) return Compiled::warpgroups;
  return attributes.maxThreadsPerBlock >= kClusters ? Compiled::clusters : Compiled::any;
}

}  // namespace sluice::gpu
