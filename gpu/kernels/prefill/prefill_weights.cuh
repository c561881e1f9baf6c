#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/prefill_hopper.cuh"

/// What becomes of a warpgroup's scores: a thread has 32 keys of a tile in each of two rows, as accumulators lie.
namespace sluice::gpu::detail {

/// Of a thread's two rows.
struct RowSums {
  float top[2] = {-INFINITY, -INFINITY};  ///< the row's largest score
  float mass[2] = {0.f, 0.f};             ///< of this lane's keys: the sum of weights, which are relative to `top`
};

/// Masks the keys of a tile that a row may not see. The thread's first row is at `position`.
__device__ inline void mask_scores(float (&scores)[64], const QueryBlock& block, std::uint32_t position,
                                   std::uint32_t tile) {
  const int first_key = static_cast<int>(tile * kTile + 2 * (threadIdx.x % 4));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = static_cast<int>(max(block.key_begin, first_seen(position + 8 * half, block.reach))) - first_key;
    const int end = static_cast<int>(min(block.key_end, position + 8 * half + 1)) - first_key;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * n + 2 * half + e];
        score = 8 * n + e >= begin && 8 * n + e < end ? score : -INFINITY;
      }
    }
  }
}

/// What a tile's scores change in the two rows.
struct RowChange {
  float base[2];    ///< the new top as an exponent of 2
  float factor[2];  ///< of what was summed up before
};

__device__ inline RowChange raise_tops(const float (&scores)[64], RowSums& sums, float scale) {
  RowChange change;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = sums.top[half];
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      top = fmaxf(top, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    change.base[half] = top == -INFINITY ? 0.f : top * scale;
    change.factor[half] = exp2_fast(sums.top[half] * scale - change.base[half]);
    sums.top[half] = top;
  }
  return change;
}

/// Makes the scores of one row weights.
__device__ inline void weigh_row(float (&scores)[64], RowSums& sums, const RowChange& change, float scale, int half) {
  float mass[2] = {sums.mass[half] * change.factor[half], 0.f};
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& score = scores[4 * n + 2 * half + e];
      score = exp2_fast(score * scale - change.base[half]);
      mass[e] += score;
    }
  }
  sums.mass[half] = mass[0] + mass[1];
}

template <int kCount>
__device__ void scale_row(float (&out)[kCount], float factor, int half) {
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    out[4 * n + 2 * half] *= factor;
    out[4 * n + 2 * half + 1] *= factor;
  }
}

/// Weights of one row as an operand of products.
template <class T>
__device__ void pack_row(std::uint32_t (&packed)[kTile / 16][4], const float (&weights)[64], int half) {
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int at = 8 * step + 4 * part + 2 * half;
      packed[step][2 * part + half] = pack<T>(weights[at], weights[at + 1]);
    }
  }
}

}  // namespace sluice::gpu::detail
