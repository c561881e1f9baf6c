#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/backend.hpp"

namespace sluice::gpu {

/// A TopPTask as the kernel wants it.
struct TopPRow {
  const float* values = nullptr;
  std::uint32_t* mask = nullptr;
  std::uint32_t* kept = nullptr;  ///< may be null
  std::uint32_t count = 0;
  float p = 1.f;
};

/// One launch for all rows, one thread block each.
void launch_top_p(const TaskArray<TopPRow>& rows, cudaStream_t stream);

/// Asks for as much shared memory as the current device has.
void load_top_p_kernels();

}  // namespace sluice::gpu
