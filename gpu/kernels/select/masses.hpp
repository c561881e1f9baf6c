#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"

namespace sluice::gpu {

/// The runs of one task of an `attend` that wants their masses; see AttendJob::masses.
struct alignas(16) MassTask {
  const float* octets = nullptr;         ///< device [octets, group], to base 2
  const std::uint32_t* lists = nullptr;  ///< pinned [runs]: see `octets_word`
  float* out = nullptr;                  ///< [runs, group], natural
  std::uint32_t runs = 0;

  /// A run's octets are consecutive: at most 32, for pages have at most 256 tokens.
  static constexpr std::uint32_t kCountBits = 6;
  [[nodiscard]] static constexpr std::uint32_t octets_word(std::uint32_t first, std::uint32_t count) noexcept {
    return first << kCountBits | count;
  }
};

/// Sums octets to runs. `most_runs`: of any task.
/// @throws Error{Errc::device} if the launch is refused.
void launch_masses(const TaskArray<MassTask>& tasks, std::uint32_t most_runs, std::uint32_t group, cudaStream_t stream);
void load_mass_kernels();

}  // namespace sluice::gpu
