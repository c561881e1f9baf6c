#pragma once

#include <cuda_runtime_api.h>

namespace sluice::gpu {

/// Makes the device current while a verb launches: streams belong to one, and callers may have made another current.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    (void)cudaGetDevice(&before_);
    if (before_ != ordinal) (void)cudaSetDevice(ordinal);
    changed_ = before_ != ordinal;
  }
  ~CurrentDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace sluice::gpu
