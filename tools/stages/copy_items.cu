#include "tools/stages/copy_items.hpp"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "sluice/units.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kCopyThreads = 256;

__global__ void copy_items_kernel(uint4* to, const uint4* from, std::uint32_t count) {
  gpu::detail::wait_for_kernel_before();
  const std::uint32_t i = blockIdx.x * kCopyThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
}

}  // namespace

void launch_copy_items(std::byte* to, const std::byte* from, std::uint64_t bytes, cudaStream_t stream) {
  const auto count = static_cast<std::uint32_t>(bytes / sizeof(uint4));
  copy_items_kernel<<<static_cast<unsigned>(div_up(count, kCopyThreads)), kCopyThreads, 0, stream>>>(
      reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), count);
  gpu::check(cudaGetLastError(), "send the page tables of a prefill");
}

void load_copy_items_kernel() { gpu::load_kernel(copy_items_kernel, "load the kernel that copies items"); }

}  // namespace sluice::tools
