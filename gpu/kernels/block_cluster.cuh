#pragma once

#include <cstdint>

#include "gpu/kernels/tma.cuh"

/// Thread block clusters and each other's shared memory (compute capability 9.0). Where there are none, a block is a
/// cluster of its own.
namespace sluice::gpu::detail {

[[nodiscard]] __device__ inline std::uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

[[nodiscard]] __device__ inline std::uint32_t cluster_blocks() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}

/// All threads of all blocks; what they stored before it, they see after it.
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/// As cluster_sync(), for what threads stored in their own block's shared memory and nothing else: it waits for no
/// stores to other memory, which take long to get there.
__device__ inline void cluster_sync_own() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

/// Where the variable that `own` is in this block lies in the block of that rank.
[[nodiscard]] __device__ inline std::uint32_t address_in(const void* own, std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
#else
  return shared_address(own);
#endif
}

[[nodiscard]] __device__ inline std::uint32_t load_in_cluster(std::uint32_t address) {
  std::uint32_t value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

[[nodiscard]] __device__ inline float load_float_in_cluster(std::uint32_t address) {
  return __uint_as_float(load_in_cluster(address));
}

/// Four floats, 16-byte aligned.
[[nodiscard]] __device__ inline float4 load4_in_cluster(std::uint32_t address) {
  float4 value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

__device__ inline void store_in_cluster(std::uint32_t address, std::uint32_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#else
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

__device__ inline void or_in_cluster(std::uint32_t address, std::uint32_t bits) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
#else
  asm volatile("red.relaxed.cta.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
#endif
}

__device__ inline void add_in_cluster(std::uint32_t address, std::uint32_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#else
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

}  // namespace sluice::gpu::detail
