#pragma once

#include <cstddef>

#include "gpu/kernels/forward/cut.cuh"
#include "gpu/kernels/forward/search.cuh"
#include "gpu/kernels/select/foresight.cuh"
#include "gpu/tuning.hpp"

/// The k largest scores of each query head of a group among the candidates that were found while the keys were scored.
/// A block of the cluster each: nothing is exchanged but what is chosen.
namespace sluice::gpu::forward {

/// What a cut of drawn tokens says of the chances, to a block of the cluster.
__device__ inline void tell_thresholds(DrawThresholds* thresholds, std::uint32_t block, const Cut& cut) {
  const std::uint32_t there = detail::address_in(thresholds, block);
  const bool all = cut.takes_all();
  detail::store_in_cluster(there + offsetof(DrawThresholds, largest_left),
                           __float_as_uint(all ? -INFINITY : foresight::score_of(cut.key)));
  detail::store_in_cluster(there + offsetof(DrawThresholds, least_drawn),
                           __float_as_uint(all ? -INFINITY : foresight::score_of(cut.ahead)));
  detail::store_in_cluster(there + offsetof(DrawThresholds, drawn), all ? cut.picks : cut.picks - 1);
}

/// Bounds of the next step, of the query heads of a list.
class Learner {
 public:
  /// @param list  whose heads begin with `first`
  /// @param room    for keys of a head's candidates where they are looked at
  /// @param copies  whether copies of keys were scored: of other scores no candidates were found on the way
  __device__ Learner(const Foresight& foresight, std::uint32_t list, std::uint64_t first, const float* q,
                     std::uint32_t room, bool copies)
      : foresight_(foresight), first_(first), list_(list), q_(q), room_(min(room, foresight.room)), copies_(copies) {}
  [[nodiscard]] __device__ bool foresees() const { return copies_ && foresight_.bounds != nullptr; }
  [[nodiscard]] __device__ std::uint32_t found(std::uint32_t h) const { return foresight_.counts[first_ + h]; }
  [[nodiscard]] __device__ std::uint32_t room() const { return room_; }
  [[nodiscard]] __device__ const Candidate* candidates(std::uint32_t h) const {
    return foresight_.candidates + (first_ + h) * foresight_.room;
  }
  /// By a warp: after a choice that was not foreseen, or was.
  __device__ void learn(std::uint32_t h, foresight::Chosen chosen, bool foreseen = false) const {
    if (!foresees()) return;
    const std::uint32_t dim = foresight_.head_dim;
    float squares = 0.f;
    float along = 0.f;
    for (std::uint32_t i = threadIdx.x % kWarp; i < dim; i += kWarp) {
      const float value = q_[std::uint64_t{h} * dim + i];
      squares += value * value;
      along += value * foresight_.centers[std::uint64_t{list_} * dim + i];
    }
#pragma unroll
    for (std::uint32_t step = 1; step < kWarp; step *= 2) {
      squares += __shfl_xor_sync(kAll, squares, step);
      along += __shfl_xor_sync(kAll, along, step);
    }
    if (threadIdx.x % kWarp != 0) return;
    chosen.query = {.length = sqrtf(squares), .center = along * foresight_.score_scale};
    HeadBound& bound = foresight_.bounds[first_ + h];
    bound = fits(chosen.picks) ? foresight::bound_after(chosen, margin_after(bound, h, chosen.picks, foreseen))
                               : HeadBound{};
  }
  /// Whether there is room for more candidates than are chosen, as many as it takes to foresee them.
  [[nodiscard]] __device__ bool fits(std::uint32_t picks) const {
    return most_margin(picks) >= foresight::kNarrowMargin;
  }

 private:
  /// One that was foreseen in vain, as another of its group was not, has as many as before.
  [[nodiscard]] __device__ float margin_after(const HeadBound& bound, std::uint32_t h, std::uint32_t picks,
                                              bool foreseen) const {
    return fminf(most_margin(picks), free_margin(bound, h, picks, foreseen));
  }
  [[nodiscard]] __device__ float free_margin(const HeadBound& bound, std::uint32_t h, std::uint32_t picks,
                                             bool foreseen) const {
    if (bound.bound == 0.f || bound.margin == 0.f || found(h) > room()) return foresight::kFirstMargin;
    if (foreseen) return fmaxf(foresight::kLeastMargin, foresight::kLessMargin * bound.margin);
    return found(h) < picks ? fminf(foresight::kMostMargin, foresight::kMoreMargin * bound.margin) : bound.margin;
  }
  /// With which candidates, of which there may be somewhat more than expected, still have room.
  [[nodiscard]] __device__ float most_margin(std::uint32_t picks) const {
    return foresight::kRoomUsed * static_cast<float>(room()) / static_cast<float>(picks);
  }

  const Foresight& foresight_;
  std::uint64_t first_;
  std::uint32_t list_;
  const float* q_;  ///< of the list's first head
  std::uint32_t room_;
  bool copies_;
};

struct ForeseenShared {
  std::uint32_t missing[kMaxGroup];     ///< not 0: the head's candidates do not tell what it chooses
  foresight::Chosen chosen[kMaxGroup];  ///< of the heads that this block chose for
  std::uint32_t warps[2][kWarps];       ///< counts, and least keys
  std::uint32_t room;                   ///< of the learner
};

class Foreseen {
 public:
  /// @param gathered  shared memory for the learner's room of keys
  __device__ Foreseen(ForeseenShared& s, CutShared& cut, std::uint32_t* gathered, const Learner& learner,
                      const Choices& choices)
      : s_(s), cut_(cut), gathered_(gathered), learner_(learner), c_(choices) {}

  /// Whether candidates can tell what is chosen.
  [[nodiscard]] __device__ bool can() const {
    return learner_.foresees() && c_.end - c_.begin > c_.picks && learner_.fits(c_.picks);
  }

  /// set(token) for every token that a head chooses, whichever block's it is. Returns for how many heads there were too
  /// few candidates or too many. All threads of all blocks, after a cluster_sync.
  template <class Set>
  __device__ std::uint32_t run(const Part& part, const Set& set) {
    if (threadIdx.x == 0) s_.room = learner_.room();
    for (std::uint32_t h = part.rank(); h < c_.heads; h += part.blocks()) {
      Cut cut;
      const bool chosen = choose(h, cut, set);
      __syncthreads();  // The next head's come to the same place.
      if (threadIdx.x >= part.blocks()) continue;
      detail::store_in_cluster(detail::address_in(&s_.missing[h], threadIdx.x), chosen ? 0 : 1);
      if (chosen && c_.drawn != nullptr) tell_thresholds(c_.drawn->thresholds + h, threadIdx.x, cut);
    }
    detail::cluster_sync();
    const std::uint32_t lane = threadIdx.x % kWarp;
    return static_cast<std::uint32_t>(
        __popc(static_cast<int>(__ballot_sync(kAll, lane < c_.heads && s_.missing[lane] != 0))));
  }

 private:
  template <class Set>
  __device__ bool choose(std::uint32_t h, Cut& cut, const Set& set) {
    const std::uint32_t found = learner_.found(h);
    if (found < c_.picks || found > learner_.room()) return false;
    const Range range = gather(h, found);
    if (range.count < c_.picks) return false;
    const auto token_of = [in_shared = staged(found) ? tokens() : nullptr, from = learner_.candidates(h)](
                              std::uint32_t i) { return in_shared != nullptr ? in_shared[i] : from[i].token; };
    cut = cut_by_error(c_, h, GatheredTokens{cut_, c_.drawn, gathered_, found, range.least, token_of});
    if (cut.takes_nothing()) return false;
#pragma unroll 4
    for (std::uint32_t i = threadIdx.x; i < found; i += kThreads) {
      const std::uint32_t key = gathered_[i];
      if (key == 0 || key < cut.key) continue;
      if (const std::uint32_t token = token_of(i); cut.takes(key, token)) set(token);
    }
    if (threadIdx.x == 0)
      s_.chosen[h] = {.kth = foresight::score_of(cut.key),
                      .rank = cut.picks,
                      .least = foresight::score_of(range.least),
                      .found = range.count,
                      .picks = c_.picks};
    return true;
  }

  /// Whether so many candidates' tokens have room behind their keys, where they are read in no time.
  [[nodiscard]] __device__ bool staged(std::uint32_t found) const { return 2 * found <= learner_.room(); }
  [[nodiscard]] __device__ std::uint32_t* tokens() const { return gathered_ + learner_.room() / 2; }

  /// Candidates that may be chosen: the others' keys become 0.
  struct Range {
    std::uint32_t count = 0;
    std::uint32_t least = kAll;
  };
  __device__ Range gather(std::uint32_t h, std::uint32_t found) {
    const Candidate* const from = learner_.candidates(h);
    Range own;
#pragma unroll 4
    for (std::uint32_t i = threadIdx.x; i < found; i += kThreads) {
      Candidate candidate = from[i];
      if (!c_.between(candidate.token)) candidate.key = 0;
      gathered_[i] = candidate.key;
      if (staged(found)) tokens()[i] = candidate.token;
      if (candidate.key == 0) continue;
      ++own.count;
      own.least = min(own.least, candidate.key);
    }
    const std::uint32_t lane = threadIdx.x % kWarp;
    own = {.count = __reduce_add_sync(kAll, own.count), .least = __reduce_min_sync(kAll, own.least)};
    if (lane == 0) {
      s_.warps[0][threadIdx.x / kWarp] = own.count;
      s_.warps[1][threadIdx.x / kWarp] = own.least;
    }
    __syncthreads();
    return {.count = __reduce_add_sync(kAll, lane < kWarps ? s_.warps[0][lane] : 0),
            .least = __reduce_min_sync(kAll, lane < kWarps ? s_.warps[1][lane] : kAll)};
  }

  ForeseenShared& s_;
  CutShared& cut_;
  std::uint32_t* gathered_;
  const Learner& learner_;
  Choices c_;
};

}  // namespace sluice::gpu::forward
