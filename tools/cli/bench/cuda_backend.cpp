#include "gpu/device/cuda_device.hpp"
#include "tools/cli/bench/backend_of.hpp"

namespace sluice::tools {

Backend* cuda_backend_of(Device& device) noexcept {
  auto* const cuda = dynamic_cast<gpu::CudaDevice*>(&device);
  return cuda == nullptr ? nullptr : &cuda->backend();
}

}  // namespace sluice::tools
