#include <algorithm>
#include <cstddef>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/clock.cuh"
#include "gpu/kernels/load.hpp"
#include "tools/link/memory_load.hpp"

namespace sluice::tools {
namespace {

/// A quarter of what a multiprocessor holds and less than half of its registers, so that other kernels find room
/// beside it; enough bytes in flight for the whole rate all the same.
constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kInFlight = 4;
/// Between two looks at the clock: 8 x 32 KiB of one thread block, some 10 us.
constexpr std::uint32_t kStripesPerLook = 8;
constexpr std::uint32_t kLongest_us = 1'000'000;

/// Thread block b owns the units [begin, end) and goes round them in stripes of kInFlight units per thread.
__global__ void __launch_bounds__(kThreads)
    memory_load_kernel(uint4* data, std::uint64_t units, std::uint64_t duration_ns, unsigned long long* moved) {
  constexpr std::uint64_t kStripe = std::uint64_t{kThreads} * kInFlight;
  const std::uint64_t begin = units * blockIdx.x / gridDim.x;
  const std::uint64_t stripes = (units * (blockIdx.x + 1) / gridDim.x - begin) / kStripe;
  if (stripes == 0) return;
  const std::uint64_t start = gpu::detail::now_ns();
  std::uint64_t done = 0;
  __shared__ bool over;
  do {
    for (std::uint32_t look = 0; look < kStripesPerLook; ++look, ++done) {
      uint4* const mine = data + begin + done % stripes * kStripe + threadIdx.x;
      uint4 unit[kInFlight];
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) unit[i] = mine[i * kThreads];
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) {
        unit[i].x += 1;
        mine[i * kThreads] = unit[i];
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) over = gpu::detail::now_ns() - start >= duration_ns;
    __syncthreads();
  } while (!over);
  if (threadIdx.x == 0) atomicAdd_system(moved, static_cast<unsigned long long>(2 * done * kStripe * sizeof(uint4)));
}

}  // namespace

void launch_memory_load(std::byte* data, std::uint64_t bytes, std::uint32_t duration_us, std::uint64_t* moved,
                        std::uint32_t ctas, cudaStream_t stream) {
  memory_load_kernel<<<std::max(ctas, 1u), kThreads, 0, stream>>>(
      reinterpret_cast<uint4*>(data), bytes / sizeof(uint4), std::min(duration_us, kLongest_us) * std::uint64_t{1000},
      reinterpret_cast<unsigned long long*>(moved));
  gpu::check(cudaGetLastError(), "launch the memory load");
}

void load_memory_load_kernels() { gpu::load_kernel(memory_load_kernel, "load the memory load"); }

}  // namespace sluice::tools
