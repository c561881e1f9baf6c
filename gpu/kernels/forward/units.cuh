#pragma once

#include <cstdint>

#include "gpu/kernels/forward/near.cuh"
#include "sluice/forward_memory.hpp"

namespace sluice::gpu::forward {

/// A thread's share of a list's far part, in units that are read without waiting for the answer: whether they are of it
/// their tags say. So that it takes one way over the link, they are requested before anything is known.
class FarUnits {
 public:
  __device__ void request(const ForwardMemory& m, std::uint32_t list) {
    const std::uint32_t units = m.list_units();
    const FarUnit* const first = m.far_units + std::uint64_t{list} * units;
#pragma unroll
    for (std::uint32_t i = 0; i < kMost; ++i) {
      const std::uint32_t unit = threadIdx.x + i * near::kThreads;
      if (unit < units) load(first + unit, low_[i], high_[i]);
    }
  }
  /// Waits for them, and puts them into memory that the thread block shares. Whether all answer question `asked`.
  __device__ bool put(const ForwardMemory& m, std::uint64_t asked, float* to) const {
    const std::uint32_t units = m.list_units();
    bool answer = true;
#pragma unroll
    for (std::uint32_t i = 0; i < kMost; ++i) {
      const std::uint32_t unit = threadIdx.x + i * near::kThreads;
      if (unit >= units) continue;
      float* const floats = to + FarUnit::kFloats * unit;
      floats[0] = __uint_as_float(static_cast<std::uint32_t>(low_[i]));
      floats[1] = __uint_as_float(static_cast<std::uint32_t>(low_[i] >> 32));
      floats[2] = __uint_as_float(static_cast<std::uint32_t>(high_[i]));
      answer &= static_cast<std::uint32_t>(high_[i] >> 32) == static_cast<std::uint32_t>(asked);
    }
    return answer;
  }

 private:
  static_assert(FarUnit::kFloats == 3 && sizeof(FarUnit) == 16 && kMostListUnits % near::kThreads == 0);
  static constexpr std::uint32_t kMost = kMostListUnits / near::kThreads;

  /// All 16 bytes at once: as one number, atomically with respect to the host. A load of a vector of smaller ones need
  /// not be. Those of a thread do not wait for one another.
  static __device__ void load(const FarUnit* unit, std::uint64_t& low, std::uint64_t& high) {
    asm volatile(
        "{\n .reg .b128 unit;\n ld.relaxed.sys.global.b128 unit, [%2];\n mov.b128 {%0, %1}, unit;\n}"
        : "=l"(low), "=l"(high)
        : "l"(unit));
  }

  std::uint64_t low_[kMost] = {};
  std::uint64_t high_[kMost] = {};
};

}  // namespace sluice::gpu::forward
