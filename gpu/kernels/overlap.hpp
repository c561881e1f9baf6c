#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/device/cuda_error.hpp"

/// Kernels that begin while the one before them on their stream still runs (programmatic dependent launch, compute
/// capability 9.0): where they have little to do, being launched takes as long as that.
/// Such a kernel calls detail::wait_for_kernel_before() first of all, in every thread, and so sees what it would have
/// seen; what comes after it waits for it as ever. Only what the host wrote before the launch may be read before.
namespace sluice::gpu {

/// Whether kernels were compiled for a device that can, and the current one is such. Elsewhere they follow one another.
[[nodiscard]] bool kernels_overlap();

/// What comes before a launch on its stream.
enum class Before : bool { kernel, other };

/// A launch that overlaps if it can, behind a kernel; of clusters of as many blocks if that is not 1.
class OverlappingLaunch {
 public:
  OverlappingLaunch(dim3 grid, std::uint32_t threads, std::uint32_t shared_bytes, cudaStream_t stream,
                    std::uint32_t cluster_blocks = 1, Before before = Before::kernel) {
    config_.gridDim = grid;
    config_.blockDim = threads;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (before == Before::kernel && kernels_overlap()) {
      cudaLaunchAttribute& overlap = attributes_[config_.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_blocks != 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {.x = cluster_blocks, .y = 1, .z = 1};
    }
  }
  OverlappingLaunch(const OverlappingLaunch&) = delete;
  OverlappingLaunch& operator=(const OverlappingLaunch&) = delete;

  /// `what` as for check(), as in "launch attend".
  template <class... Parameters, class... Arguments>
  void run(void (*kernel)(Parameters...), const char* what, const Arguments&... arguments) const {
    check(cudaLaunchKernelEx(&config_, kernel, static_cast<Parameters>(arguments)...), what);
  }

 private:
  cudaLaunchAttribute attributes_[2]{};
  cudaLaunchConfig_t config_{};
};

}  // namespace sluice::gpu
