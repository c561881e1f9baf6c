#pragma once

#include <cstdint>

#include "gpu/kernels/tma.cuh"

/// Thread block clusters and each other's shared memory (compute capability 9.0).
namespace sluice::gpu::detail {

[[nodiscard]] __device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

[[nodiscard]] __device__ inline std::uint32_t cluster_blocks() {
  std::uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

/// All threads of all blocks; what they stored before it, they see after it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Where the variable that `own` is in this block lies in the block of that rank.
[[nodiscard]] __device__ inline std::uint32_t address_in(const void* own, std::uint32_t rank) {
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

__device__ inline void store_in_cluster(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ inline void add_in_cluster(std::uint32_t address, std::uint32_t value) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace sluice::gpu::detail
