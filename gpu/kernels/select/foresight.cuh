#pragma once

#include <cstdint>

#include "gpu/kernels/select/foresight.hpp"
#include "gpu/kernels/select/top_k.cuh"

/// How a bound follows from one choice, and how candidates are found by it for the next.
namespace sluice::gpu::foresight {

/// A head begins with as many candidates for one that is chosen, and has between these when it is known.
inline constexpr float kFirstMargin = 2.5f;
inline constexpr float kLeastMargin = 2.f;
inline constexpr float kMostMargin = 6.f;
/// A head that found too few has so many more the next time, and others a little fewer each time: so that one in
/// 350 finds too few, where scores of one step and the next differ as they like. All heads of a layer wait for one that
/// reads all scores once more.
inline constexpr float kMoreMargin = 2.f;
inline constexpr float kLessMargin = 0.998f;
/// Heads that choose so many that there is no room for a margin like these have what fills this part of the room, and
/// those with less than a narrow one foresee nothing.
inline constexpr float kRoomUsed = 0.85f;
inline constexpr float kNarrowMargin = 1.25f;

/// What bounds are relative to.
struct QueryMeasure {
  float length = 0.f;
  float center = 0.f;  ///< score of the list's center
};

/// Scores from here on are candidates, for such a query.
__device__ __forceinline__ float least_of(const HeadBound& bound, const QueryMeasure& query) {
  const float least = bound.bound * query.length + query.center;
  return bound.bound != 0.f && isfinite(least) ? least : INFINITY;
}

/// What a choice has shown.
struct Chosen {
  float kth = 0.f;          ///< the rank-th largest score
  std::uint32_t rank = 0;   ///< the head has chosen as many, at most `picks`
  float least = 0.f;        ///< `found` scores reached this
  std::uint32_t found = 0;  ///< 0: that is not known
  std::uint32_t picks = 0;  ///< that the head may choose
  QueryMeasure query{};
};

/// Beyond the k-th the scores of a head fall off about exponentially: so many more reach a bound so much lower.
__device__ inline HeadBound bound_after(const Chosen& chosen, float margin) {
  const float more = static_cast<float>(chosen.found) / static_cast<float>(chosen.rank);
  const float scale = more > 1.05f && chosen.kth > chosen.least ? (chosen.kth - chosen.least) / logf(more)
                                                                : 0.15f * fabsf(chosen.kth - chosen.query.center);
  const float below = margin * (static_cast<float>(chosen.picks) / static_cast<float>(chosen.rank));
  const float bound = (chosen.kth - chosen.query.center - scale * logf(below)) / chosen.query.length;
  return {.bound = isfinite(bound) ? bound : 0.f, .margin = margin};
}

/// The score that a key is of.
__device__ inline float score_of(std::uint32_t key) {
  return __uint_as_float(key == 0 ? 0x7fc0'0000u : (key >> 31) != 0 ? key & 0x7fff'ffffu : ~key);
}

/// Candidates that a thread block has found for some heads, each warp its own, so that none waits for another.
template <std::uint32_t kWarps, std::uint32_t kHeads, std::uint32_t kRoom>
struct Staged {
  std::uint32_t counts[kWarps][kHeads];
  Candidate candidates[kWarps][kHeads][kRoom];  ///< what is more is written at once
};

/// Of heads that follow a first one, all lists' counted through.
class Finder {
 public:
  __device__ Finder(const Foresight& foresight, std::uint64_t first) : foresight_(foresight), first_(first) {}
  [[nodiscard]] __device__ float least(std::uint32_t head, const QueryMeasure& query) const {
    return least_of(foresight_.bounds[first_ + head], query);
  }
  /// What the lanes of a warp have found, all at once.
  /// @param lanes  of the warp that look at the same head as this one
  /// @param count  of that head, found by this warp so far
  template <std::uint32_t kWarps, std::uint32_t kHeads, std::uint32_t kRoom>
  __device__ __forceinline__ void add(Staged<kWarps, kHeads, kRoom>& staged, std::uint32_t head, std::uint32_t lanes,
                                      bool found, const Candidate& candidate, std::uint32_t& count) const {
    const std::uint32_t lane = threadIdx.x % top_k::kWarp;
    const std::uint32_t all = __ballot_sync(top_k::kAll, found) & lanes;
    const std::uint32_t at = count + __popc(all & ((1u << lane) - 1));
    if (found && at < kRoom) staged.candidates[threadIdx.x / top_k::kWarp][head][at] = candidate;
    const std::uint32_t over = __ballot_sync(top_k::kAll, found && at >= kRoom);
    if (over != 0) {  // One lane counts for those of its head: single additions would queue for the same counter.
      const std::uint32_t mine = over & lanes;
      const std::uint32_t first = mine == 0 ? lane : __ffs(static_cast<int>(mine)) - 1;
      std::uint32_t begin = 0;
      if (mine != 0 && lane == first) begin = atomicAdd(foresight_.counts + first_ + head, __popc(mine));
      begin = __shfl_sync(top_k::kAll, begin, static_cast<int>(first));
      if ((over >> lane & 1) != 0) put(head, begin + __popc(mine & ((1u << lane) - 1)), candidate);
    }
    count += __popc(all);
  }
  /// By a warp for each head, after a barrier, when `counts` is complete: written out together, as each would queue for
  /// the same counter.
  template <std::uint32_t kWarps, std::uint32_t kHeads, std::uint32_t kRoom>
  __device__ void write(const Staged<kWarps, kHeads, kRoom>& staged, std::uint32_t heads) const {
    const std::uint32_t head = threadIdx.x / top_k::kWarp;
    const std::uint32_t lane = threadIdx.x % top_k::kWarp;
    if (head >= heads) return;
    const std::uint32_t own = lane < kWarps ? min(staged.counts[lane][head], kRoom) : 0;
    const std::uint32_t inclusive = top_k::inclusive_sum(own);
    const std::uint32_t all = __shfl_sync(top_k::kAll, inclusive, kWarps - 1);
    std::uint32_t begin = 0;
    if (lane == 0 && all != 0) begin = atomicAdd(foresight_.counts + first_ + head, all);
    begin = __shfl_sync(top_k::kAll, begin, 0);
#pragma unroll 1
    for (std::uint32_t warp = 0; warp < kWarps; ++warp) {
      const std::uint32_t count = __shfl_sync(top_k::kAll, own, static_cast<int>(warp));
      const std::uint32_t before = __shfl_sync(top_k::kAll, inclusive, static_cast<int>(warp)) - count;
#pragma unroll 1
      for (std::uint32_t i = lane; i < count; i += top_k::kWarp)
        put(head, begin + before + i, staged.candidates[warp][head][i]);
    }
  }

 private:
  __device__ void put(std::uint32_t head, std::uint32_t at, const Candidate& candidate) const {
    if (at < foresight_.room) foresight_.candidates[(first_ + head) * foresight_.room + at] = candidate;
  }

  const Foresight& foresight_;
  std::uint64_t first_;
};

}  // namespace sluice::gpu::foresight
