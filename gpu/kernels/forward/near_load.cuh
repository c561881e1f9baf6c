#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/near.cuh"

/// How near rows are filled, over the link.
namespace sluice::gpu::near {

/// Far rows row_at(i) of a plane, `count` of them, are read to their near ones. All threads of a block, each of which
/// has `kAtOnce` words of 16 bytes on their way: each way over the link is long.
template <std::uint32_t kAtOnce, class RowAt>
__device__ void load(const ForwardMemory& m, const Plane& plane, std::uint32_t count, const RowAt& row_at) {
  const auto quads = static_cast<std::uint32_t>(m.layout.row_bytes() / sizeof(uint4));
  const std::uint32_t all = 2 * quads * count;
  const auto half = [&](std::uint32_t i) { return i / quads % 2 * m.layout.half_bytes(); };
  for (std::uint32_t base = threadIdx.x; base < all; base += kAtOnce * blockDim.x) {
    uint4 read[kAtOnce];
    std::uint32_t places[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * blockDim.x;
      if (i >= all) continue;
      const std::uint32_t row = row_at(i / (2 * quads));
      const std::byte* const from = m.far_key(plane.index, row) + half(i);
      read[k] = __ldcv(reinterpret_cast<const uint4*>(from) + i % quads);
      places[k] = place_of(plane.near_of[row]);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * blockDim.x;
      if (i >= all) continue;
      reinterpret_cast<uint4*>(m.near_key(plane.index, places[k]) + half(i))[i % quads] = read[k];
    }
  }
}

/// The same of rows with scales, which are unfolded.
template <std::uint32_t kAtOnce, class RowAt>
__device__ void load_scaled(const ForwardMemory& m, const Plane& plane, std::uint32_t count, const RowAt& row_at) {
  const auto quads = static_cast<std::uint32_t>(m.far_layout.row_bytes() / sizeof(uint4));
  const std::uint32_t all = 2 * quads * count;
  for (std::uint32_t base = threadIdx.x; base < all; base += kAtOnce * blockDim.x) {
    uint4 read[kAtOnce];
    float scale[kAtOnce];
    std::uint32_t places[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * blockDim.x;
      if (i >= all) continue;
      const std::uint32_t row = row_at(i / (2 * quads));
      const std::uint32_t half = i / quads % 2;
      const std::byte* const from = m.far_key(plane.index, row) + half * m.far_layout.half_bytes();
      read[k] = __ldcv(reinterpret_cast<const uint4*>(from) + i % quads);
      scale[k] = __ldcv(reinterpret_cast<const float*>(m.far_scale_bytes(plane.index, row)) + half);
      places[k] = place_of(plane.near_of[row]);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = base + k * blockDim.x;
      if (i >= all) continue;
      std::byte* const to = m.near_key(plane.index, places[k]) + i / quads % 2 * m.layout.half_bytes();
      uint4* const unfolded = reinterpret_cast<uint4*>(to) + 2 * (i % quads);
      unfolded[0] = detail::unfold_codes(make_uint2(read[k].x, read[k].y), scale[k]);
      unfolded[1] = detail::unfold_codes(make_uint2(read[k].z, read[k].w), scale[k]);
    }
  }
}

}  // namespace sluice::gpu::near
