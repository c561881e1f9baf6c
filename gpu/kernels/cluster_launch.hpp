#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::gpu {

/// How thread block clusters, `clusters` of `blocks` blocks each, are launched.
class ClusterLaunch {
 public:
  ClusterLaunch(std::uint32_t clusters, std::uint32_t blocks, std::uint32_t threads, std::uint32_t shared_bytes,
                cudaStream_t stream = nullptr) {
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim = {.x = blocks, .y = 1, .z = 1};
    config_.gridDim = clusters * blocks;
    config_.blockDim = threads;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = &cluster_;
    config_.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
  [[nodiscard]] const cudaLaunchConfig_t& config() const noexcept { return config_; }

  /// Of these, how many the current device runs at once: none on a part of a device that is too small.
  template <class Kernel>
  [[nodiscard]] int at_once(Kernel* kernel) const {
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config_) == cudaSuccess) return clusters;
    (void)cudaGetLastError();  // A size that the device does not know.
    return 0;
  }

 private:
  cudaLaunchAttribute cluster_{};
  cudaLaunchConfig_t config_{};
};

}  // namespace sluice::gpu
