// The CUDA device of a build that has none.
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

constexpr const char* kAbsent =
    "this build has no CUDA device; configure with SLUICE_CUDA=ON where nvcc is installed, or use the host device";

}  // namespace

std::uint32_t cuda_devices() noexcept { return 0; }

std::shared_ptr<Device> make_cuda_device(const CudaDeviceOptions&) { throw Error(Errc::unsupported, kAbsent); }

CudaDeviceFacts cuda_device_facts(int) { throw Error(Errc::unsupported, kAbsent); }

}  // namespace sluice
