#pragma once

#include "gpu/kernels/select/power_sum.cuh"
#include "gpu/kernels/select/score_int4.cuh"

/// What the scores of a thread block weigh, see ScoreSums.
namespace sluice::gpu::score_int4 {

/// Adds what scores weigh.
__device__ __forceinline__ void weigh(detail::PowerSum& sum, const float (&scores)[kWarpOctets], float softcap) {
  float x[kWarpOctets];
#pragma unroll
  for (std::uint32_t o = 0; o < kWarpOctets; ++o) x[o] = detail::exponent_of(scores[o], softcap);
  sum.add(x);
}

/// What a warp's scores weigh, of heads `first_head` and on of the block's fragment: added up over the block, and
/// written. `staged`: [kWarps, kHeads]. All threads.
template <std::uint32_t kFragments>
__device__ void put_sums(detail::PowerSum (&sums)[kFragments], float2 (&staged)[kWarps][kHeads], std::uint32_t heads,
                         float2* out) {
  const std::uint32_t warp = threadIdx.x / kWarp;
#pragma unroll
  for (std::uint32_t f = 0; f < kFragments; ++f) {
    sums[f].add_lanes(kTileHeads);
    if (threadIdx.x % kWarp < kTileHeads) staged[warp][f * kTileHeads + lane_head()] = {sums[f].top, sums[f].mass};
  }
  __syncthreads();
  if (threadIdx.x >= heads) return;
  detail::PowerSum all;
#pragma unroll
  for (std::uint32_t w = 0; w < kWarps; ++w) all.add_sum({staged[w][threadIdx.x].x, staged[w][threadIdx.x].y});
  out[threadIdx.x] = {all.top, all.mass};
}

}  // namespace sluice::gpu::score_int4
