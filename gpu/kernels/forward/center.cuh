#pragma once

#include "gpu/kernels/forward/new_row.cuh"
#include "gpu/kernels/select/foresight.hpp"

namespace sluice::gpu::forward {

/// What a list's center is after one more key, see Foresight. By the warp that has the key. Of a forward that does not
/// get to its end it may be after a key of no use, which only costs time.
__device__ inline void move_center(const Row& key, float* center) {
  const auto moved = [](float was, float value) {
    const float is = was + kCenterStep * (value - was);
    return isfinite(is) ? is : 0.f;
  };
  auto* const at = reinterpret_cast<float4*>(center);
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!key.has(w)) continue;
    const float4 before = at[key.word(w)];
    at[key.word(w)] = {moved(before.x, key.x[w].x), moved(before.y, key.x[w].y), moved(before.z, key.x[w].z),
                       moved(before.w, key.x[w].w)};
  }
}

}  // namespace sluice::gpu::forward
