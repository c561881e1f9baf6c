#pragma once

#include <cuda.h>

#include <cstdint>

/// Barriers in shared memory, the copies of tensor boxes that complete on them, and what else warps of different roles
/// need to work side by side (compute capability 9.0).
namespace sluice::gpu::detail {

[[nodiscard]] __device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

[[nodiscard]] __device__ inline std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline void store_shared(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// Until the phase of this parity of the barrier at a shared address has ended. Before the first phase ends, the one
/// before it, of parity 1, has.
__device__ inline void wait_at(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra through;\n bra again;\n"
      "through:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void arrive_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_and_expect_at(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Counts arrivals, and bytes that copies have still to bring; a phase ends when nothing is missing.
struct alignas(8) SharedBarrier {
  std::uint64_t word;

  /// By one thread, followed by `publish_barriers` and a __syncthreads.
  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
  }
  __device__ void arrive() { arrive_at(shared_address(&word)); }
  __device__ void arrive_and_expect(std::uint32_t bytes) { arrive_and_expect_at(shared_address(&word), bytes); }
  __device__ void wait(std::uint32_t parity) { wait_at(shared_address(&word), parity); }
};

/// Makes new barriers known to the copy engine.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Makes what this thread has stored in shared memory visible to the copy engine and to wgmma.
__device__ inline void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Where a box of a four-dimensional tensor begins, the fastest dimension first.
struct BoxStart {
  int x = 0;
  int y = 0;
  int z = 0;
  int w = 0;
};

/// Starts copying a box to a shared address; the barrier gets all its bytes. What lies outside the tensor is zeros.
__device__ inline void copy_box_at(std::uint32_t to, const CUtensorMap& map, const BoxStart& start,
                                   std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(start.x), "r"(start.y), "r"(start.z), "r"(start.w)
      : "memory");
}
__device__ inline void copy_box(void* to, const CUtensorMap& map, const BoxStart& start, SharedBarrier& barrier) {
  copy_box_at(shared_address(to), map, start, shared_address(&barrier.word));
}

/// The hardware's own barriers, 1 to 15; 0 is that of __syncthreads. `threads` counts those of both kinds.
__device__ inline void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// By all warps of a warpgroup.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sluice::gpu::detail
