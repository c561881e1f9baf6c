#pragma once

#include "gpu/kernels/forward/marks.cuh"
#include "gpu/kernels/forward/rest_mean.cuh"
#include "gpu/kernels/select/power_sum.cuh"

/// What a row leaves, see ForwardRow::rest: all that its scores weigh, which `score` has added up, less what those
/// weigh that are attended. Every block of a cluster says so of its part, and `merge` adds up.
namespace sluice::gpu::forward {

using detail::PowerSum;

inline constexpr std::uint32_t kRestHeads = 4;  ///< that are weighed at once
struct RestShared {
  float tops[kWarps][kRestHeads];
  float masses[kWarps][kRestHeads];
};

/// Of the tokens that are marked in the block's part, for heads [first, first + kRestHeads) of the group. A warp takes
/// a word, a few at a time: of most words no token is marked.
__device__ __forceinline__ void weigh_marked(const ForwardMemory& m, const Work& work, const Marks& marks,
                                             std::uint32_t first, PowerSum (&sums)[kRestHeads]) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t stride = work.row.tokens;
  const std::uint32_t heads = min(kRestHeads, m.shape.group() - first);
  const float softcap = m.shape.softcap;
  const float* scores[kRestHeads];  // Of heads that are not there the last one's.
#pragma unroll
  for (std::uint32_t h = 0; h < kRestHeads; ++h)
    scores[h] = m.scores + std::uint64_t{work.index} * m.shape.group() * m.score_room() +
                std::uint64_t{first + min(h, heads - 1)} * stride;
#pragma unroll 1
  for (std::uint32_t base = threadIdx.x / kWarp; base * kWord < marks.part().count(); base += kWarp * kWarps) {
    const std::uint32_t word = base + lane * kWarps;
    const std::uint32_t own = marks.word(word * kWord);
#pragma unroll 1
    for (std::uint32_t some = __ballot_sync(kAll, own != 0); some != 0;) {
      float x[kRestHeads][kAtOnce];
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const std::uint32_t from = some != 0 ? __ffs(static_cast<int>(some)) - 1 : 0;
        const std::uint32_t bits = some != 0 ? __shfl_sync(kAll, own, from) : 0;
        const std::uint32_t token = marks.part().token_of((base + from * kWarps) * kWord) + lane;
        some &= some - 1;
#pragma unroll
        for (std::uint32_t h = 0; h < kRestHeads; ++h)
          x[h][i] = (bits >> lane & 1) != 0 ? __ldcg(scores[h] + token) : -INFINITY;
      }
#pragma unroll
      for (std::uint32_t h = 0; h < kRestHeads; ++h) {
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) x[h][i] = detail::exponent_of(x[h][i], softcap);
        sums[h].add(x[h]);
      }
    }
  }
}

/// The block's part of what a row leaves, which has a rest. `means`: memory that nobody uses any more. All threads.
__device__ __noinline__ inline void weigh_rest(const ForwardMemory& m, const Work& work, const Marks& marks,
                                               RestShared& s, RestMeanShared<kThreads>& means) {
  const std::uint32_t group = m.shape.group();
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  const Part& part = marks.part();
  auto* const mass = reinterpret_cast<float2*>(m.rest_mass_of(work.index)) + part.rank() * group;
#pragma unroll 1
  for (std::uint32_t first = 0; first < group; first += kRestHeads) {
    PowerSum marked[kRestHeads];
    weigh_marked(m, work, marks, first, marked);
    detail::add_lanes(marked);
    __syncthreads();  // The sums of the heads before these have been read.
#pragma unroll
    for (std::uint32_t h = 0; h < kRestHeads; ++h) {
      if (lane != h) continue;
      s.tops[warp][h] = marked[h].top;
      s.masses[warp][h] = marked[h].mass;
    }
    __syncthreads();
    if (warp >= kRestHeads || first + warp >= group) continue;
    PowerSum sum;
    if (lane < kWarps) sum = {.top = s.tops[lane][warp], .mass = s.masses[lane][warp]};
    sum.add_lanes();
    if (lane == 0) mass[first + warp] = {sum.top, sum.mass};
  }
  if (means_apart(m.bucket))
    put_rest_mean<kThreads>(m, work.row, work.index, work.plane, part.rank(), part.blocks(), means);
}

}  // namespace sluice::gpu::forward
