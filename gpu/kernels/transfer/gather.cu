#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/transfer/gather.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kMaxThreads = 1024;
constexpr std::uint32_t kAll = 0xffff'ffffu;
/// Loads that a thread has in flight: 4 KiB a warp, so that one thread block of 16 warps covers most of the link's
/// round trip of 1.3 us and a few cover all of it.
constexpr std::uint32_t kInFlight = 8;
/// Blocks are cut at multiples of a cache line.
constexpr std::uint64_t kLine = 128;

/// Read once, so not worth a place in the first-level cache.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

/// One warp copies `count` units of 16 bytes.
__device__ __forceinline__ void copy_units(uint4* to, const uint4* from, std::uint64_t count, std::uint32_t lane) {
  for (std::uint64_t base = lane; base < count; base += kInFlight * kWarp) {
    uint4 unit[kInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kWarp < count) unit[i] = load_once(from + base + i * kWarp);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kWarp < count) __stcs(to + base + i * kWarp, unit[i]);
    }
  }
}

/// One warp copies `copy`: by units as far as both addresses are aligned, the rest by bytes.
__device__ __forceinline__ void copy_by_warp(const Copy& copy, std::uint32_t lane) {
  std::uint64_t done = 0;
  if (((reinterpret_cast<std::uintptr_t>(copy.to) | reinterpret_cast<std::uintptr_t>(copy.from)) & 15) == 0) {
    const std::uint64_t units = copy.bytes / sizeof(uint4);
    copy_units(reinterpret_cast<uint4*>(copy.to), reinterpret_cast<const uint4*>(copy.from), units, lane);
    done = units * sizeof(uint4);
  }
#pragma unroll 4
  for (std::uint64_t i = done + lane; i < copy.bytes; i += kWarp) copy.to[i] = copy.from[i];
}

/// Part `part` of `split` parts of a copy; empty if there are fewer lines than parts.
__device__ __forceinline__ Copy part_of(const Copy& copy, std::uint32_t part, std::uint32_t split) {
  const std::uint64_t part_bytes = ((copy.bytes + split - 1) / split + kLine - 1) / kLine * kLine;
  const std::uint64_t begin = part * part_bytes < copy.bytes ? part * part_bytes : copy.bytes;
  const std::uint64_t bytes = copy.bytes - begin < part_bytes ? copy.bytes - begin : part_bytes;
  return {.to = copy.to + begin, .from = copy.from + begin, .bytes = bytes};
}

__device__ __forceinline__ std::uint64_t from_lane(std::uint64_t value, std::uint32_t lane) {
  return __shfl_sync(kAll, static_cast<unsigned long long>(value), static_cast<int>(lane));
}

/// Item i is part i % split of copy i / split. Every warp takes consecutive items, whose descriptors its lanes fetch
/// together: a descriptor crosses the link too.
__global__ void __launch_bounds__(kMaxThreads)
    gather_kernel(const Copy* copies, std::uint64_t items, std::uint32_t split) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * (blockDim.x / kWarp);
  const std::uint64_t warp = std::uint64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const std::uint64_t end = items * (warp + 1) / warps;
  for (std::uint64_t first = items * warp / warps; first < end; first += kWarp) {
    Copy own;
    const std::uint64_t item = first + lane;
    if (item < end) own = part_of(copies[item / split], static_cast<std::uint32_t>(item % split), split);
    const std::uint32_t present = end - first < kWarp ? static_cast<std::uint32_t>(end - first) : kWarp;
    for (std::uint32_t i = 0; i < present; ++i) {
      Copy copy;
      copy.to = reinterpret_cast<std::byte*>(from_lane(reinterpret_cast<std::uintptr_t>(own.to), i));
      copy.from = reinterpret_cast<const std::byte*>(from_lane(reinterpret_cast<std::uintptr_t>(own.from), i));
      copy.bytes = from_lane(own.bytes, i);
      copy_by_warp(copy, lane);
    }
  }
}

}  // namespace

void launch_gather(const Copy* copies, std::uint32_t count, std::uint32_t ctas, std::uint32_t threads,
                   cudaStream_t stream) {
  if (count == 0) return;
  const std::uint32_t block = std::clamp(threads / kWarp * kWarp, kWarp, kMaxThreads);
  const std::uint32_t grid = std::max(ctas, 1u);
  // Few blocks are cut, so that every warp has something in flight.
  const std::uint32_t split = std::max(grid * (block / kWarp) / count, 1u);
  gather_kernel<<<grid, block, 0, stream>>>(copies, std::uint64_t{count} * split, split);
  check(cudaGetLastError(), "launch the gather kernel");
}

void load_gather_kernels() {
  load_kernel(gather_kernel, "load the gather kernel");
}

}  // namespace sluice::gpu
