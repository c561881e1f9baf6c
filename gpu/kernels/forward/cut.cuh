#pragma once

#include "gpu/kernels/forward/part.cuh"

/// The k-th of some thousand candidates, by one thread block.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kBucketBits = 11;
inline constexpr std::uint32_t kBuckets = 1u << kBucketBits;
/// Candidates that are ranked each against all others; of more, buckets find those that matter. With a limit of 512
/// ranking took 3 us on an H200 where 82 of 8K tokens were chosen.
inline constexpr std::uint32_t kRanked = 128;
inline constexpr std::uint32_t kFew = 512;  ///< that there is room for, of one key: more of them tie

struct CutShared {
  std::uint32_t warps[kWarps];
  std::uint32_t buckets[kBuckets];
  std::uint32_t bucket;  ///< of the k-th largest
  std::uint32_t rank;    ///< its rank there, from 0
  Candidate few[kFew];
  std::uint32_t fews;   ///< of them
  std::uint32_t ahead;  ///< key before the k-th
  Candidate kth;
};

/// The bucket of what has that rank, and its rank there.
__device__ inline void find_bucket(CutShared& s) {
  constexpr std::uint32_t kOwn = kBuckets / kThreads;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t top = kBuckets - 1 - kOwn * threadIdx.x;  // The first threads have the largest.
  std::uint32_t own = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kOwn; ++i) own += s.buckets[top - i];
  const std::uint32_t inclusive = top_k::inclusive_sum(own);
  if (lane == kWarp - 1) s.warps[warp] = inclusive;
  __syncthreads();
  std::uint32_t before = __reduce_add_sync(kAll, lane < warp ? s.warps[lane] : 0) + inclusive - own;
  const std::uint32_t rank = s.rank;
  __syncthreads();
  if (before <= rank && rank < before + own) {  // True for one thread.
    std::uint32_t bucket = top;
    while (before + s.buckets[bucket] <= rank) before += s.buckets[bucket--];
    s.bucket = bucket;
    s.rank = rank - before;
  }
  __syncthreads();
}

/// Of `count` candidates, whose keys are `low` or larger: buckets, and buckets of these, say which few the k-th is one
/// of, and these are ranked one by one. Takes nothing if they are too many, which then tie. All threads of one block.
/// @param drawn  the k-th is not taken, and tells with the one before it what chance the others had
/// @param token_of  of the candidate that keys[i] is of; of few, as it may lie far away
template <class TokenOf>
__device__ inline Cut cut_of(CutShared& s, const std::uint32_t* keys, std::uint32_t count, std::uint32_t low,
                             std::uint32_t k, bool drawn, const TokenOf& token_of) {
  if (threadIdx.x == 0) s.fews = s.bucket = 0;
  __syncthreads();
  if (threadIdx.x == 0) s.ahead = kAll;
  std::uint32_t most = 0;
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) most = max(most, keys[i]);
  most = __reduce_max_sync(kAll, most);
  if (threadIdx.x % kWarp == 0) atomicMax(&s.bucket, most);
  __syncthreads();
  std::uint32_t span = s.bucket - low;
  const auto inside = [&](std::uint32_t key) { return key >= low && key - low <= span; };
  s.rank = k - 1;
#pragma unroll 1
  for (std::uint32_t left = count; left > kRanked && span != 0;) {
    const auto bits = static_cast<std::uint32_t>(32 - __clz(static_cast<int>(span)));
    const std::uint32_t shift = bits > kBucketBits ? bits - kBucketBits : 0;
    __syncthreads();  // The buckets before these have been read.
    for (std::uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) s.buckets[i] = 0;
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      if (inside(keys[i])) atomicAdd(&s.buckets[(keys[i] - low) >> shift], 1u);
    }
    __syncthreads();
    find_bucket(s);
    left = s.buckets[s.bucket];
    low += s.bucket << shift;
    span = (1u << shift) - 1;
  }
  // A warp's all at once: single additions would queue for the same word.
  const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i - lane < count; i += kThreads) {
    const std::uint32_t key = i < count ? keys[i] : 0;
    const std::uint32_t few = __ballot_sync(kAll, i < count && inside(key));
    std::uint32_t at = 0;
    if (lane == 0 && few != 0) at = atomicAdd(&s.fews, static_cast<std::uint32_t>(__popc(static_cast<int>(few))));
    at = __shfl_sync(kAll, at, 0) + static_cast<std::uint32_t>(__popc(static_cast<int>(few & ((1u << lane) - 1))));
    if ((few >> lane & 1) != 0 && at < kFew) s.few[at] = {.key = key, .token = token_of(i)};
  }
  __syncthreads();
  const std::uint32_t fews = s.fews;
  __syncthreads();  // The next head's are counted in the same place.
  if (fews > kFew) return {.key = kAll, .tie = kAll};
  // Eight threads each, which look at every eighth of the others.
  constexpr std::uint32_t kSharers = 8;
  const std::uint32_t share = threadIdx.x % kSharers;
#pragma unroll 1
  for (std::uint32_t at = threadIdx.x / kSharers; at - threadIdx.x / kSharers < fews; at += kThreads / kSharers) {
    const Candidate mine = s.few[min(at, fews - 1)];
    std::uint32_t before = 0;
#pragma unroll 4
    for (std::uint32_t i = share; i < fews; i += kSharers) {
      const Candidate other = s.few[i];
      before += other.key > mine.key || (other.key == mine.key && other.token < mine.token) ? 1 : 0;
    }
#pragma unroll
    for (std::uint32_t step = 1; step < kSharers; step *= 2) before += __shfl_xor_sync(kAll, before, step);
    if (share == 0 && at < fews && before == s.rank) s.kth = mine;
    if (share == 0 && at < fews && before + 1 == s.rank) s.ahead = mine.key;
  }
  if (drawn && s.rank == 0) {  // What comes before is above the few.
    std::uint32_t least = kAll;
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      if (keys[i] >= low && keys[i] - low > span) least = min(least, keys[i]);
    }
    least = __reduce_min_sync(kAll, least);
    if (lane == 0) atomicMin(&s.ahead, least);
  }
  __syncthreads();
  return {.key = s.kth.key, .tie = ~s.kth.token - (drawn ? 0 : 1), .ahead = s.ahead};
}

}  // namespace sluice::gpu::forward
