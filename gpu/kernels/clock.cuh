#pragma once

#include <cstdint>

namespace sluice::gpu::detail {

/// Of a clock that all multiprocessors share.
__device__ inline std::uint64_t now_ns() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

}  // namespace sluice::gpu::detail
