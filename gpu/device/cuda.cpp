#include "sluice/cuda.hpp"

#include <cuda_runtime_api.h>

#include "gpu/device/cuda_device.hpp"

namespace sluice {
namespace {

bool usable(int ordinal) noexcept {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) == cudaSuccess &&
         major >= gpu::kLeastMajor;
}

}  // namespace

std::uint32_t cuda_devices() noexcept {
  int count = 0;
  std::uint32_t found = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) found += usable(ordinal) ? 1 : 0;
  (void)cudaGetLastError();
  return found;
}

std::shared_ptr<Device> make_cuda_device(const CudaDeviceOptions& options) {
  return std::make_shared<gpu::CudaDevice>(options);
}

CudaDeviceFacts cuda_device_facts(int ordinal) { return gpu::facts_of(ordinal); }

}  // namespace sluice
