#pragma once

#include "gpu/kernels/forward/marks.cuh"

/// The k largest scores of each query head of a group where one thread block can tell by itself: few candidates were
/// found for each head while keys were scored, but enough. The other blocks of its cluster have nothing to do then, and
/// nobody waits for them: a barrier of a cluster takes longer than what is done between two of them.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kQuarterWarps = kQuarter / kWarp;

/// Of a quarter of the threads, which looks after one head.
struct QuarterShared {
  std::uint32_t warps[kQuarterWarps];
  std::uint32_t least;   ///< key of a candidate
  std::uint32_t largest;
  std::uint32_t bucket;  ///< of the k-th largest
  std::uint32_t rank;    ///< its rank there, from 0
  std::uint32_t left;    ///< of how many
  std::uint32_t fews;    ///< of these
  Candidate few[kQuarter];
  Candidate kth;
};
struct AloneShared {
  QuarterShared quarters[kHeads];
  foresight::Chosen chosen[kMaxGroup];
};

class Alone {
 public:
  static constexpr std::uint32_t kBuckets = 1024;  ///< of a head

  /// @param memory  `bytes` of shared memory: candidates of kHeads heads, their buckets, and marks of all tokens
  __device__ Alone(AloneShared& s, std::byte* memory, std::uint32_t bytes, const Learner& learner,
                   const Choices& choices, std::uint32_t tokens)
      : s_(s), memory_(memory), learner_(learner), c_(choices) {
    constexpr std::uint32_t kBucketBytes = kHeads * kBuckets * sizeof(std::uint32_t);
    const std::uint32_t mark_bytes = (tokens + kChunk - 1) / kChunk * (kChunk / 8);
    marks_ = (bytes - min(mark_bytes, bytes)) & ~15u;  // Buckets, which lie before them, are cleared in wide words.
    if (marks_ <= kBucketBytes) return;
    constexpr std::uint32_t kBytes = kHeads * sizeof(Candidate);
    room_ = min(learner.room(), (marks_ - kBucketBytes) / kBytes);
  }

  /// Whether it can. The same for all blocks of the cluster; all threads of a warp.
  [[nodiscard]] __device__ bool can() const {
    if (!learner_.foresees() || c_.end - c_.begin <= c_.picks) return false;
    const std::uint32_t lane = threadIdx.x % kWarp;
    const std::uint32_t found = lane < c_.heads ? learner_.found(lane) : c_.picks;
    return __all_sync(kAll, found >= c_.picks && found <= room_) != 0;
  }
  [[nodiscard]] __device__ std::uint32_t* marks() const {
    return reinterpret_cast<std::uint32_t*>(memory_ + marks_);
  }

  /// Words of the memory before the marks, which are free once all is marked.
  [[nodiscard]] __device__ std::uint32_t room_before_marks() const { return marks_ / 4; }

  /// set(token) for every token that a head chooses. All threads of the block.
  template <class Set>
  __device__ void run(const Set& set) {
    const std::uint32_t quarter = threadIdx.x / kQuarter;
#pragma unroll 1
    for (std::uint32_t h = quarter; h < c_.heads; h += kHeads) choose(s_.quarters[quarter], quarter, h, set);
    __syncthreads();
  }

  /// What the choice lets expect of the next one: a warp for each head, while others do what the layer waits for.
  __device__ __noinline__ void learn() const {
    const std::uint32_t warp = threadIdx.x / kWarp;
    for (std::uint32_t h = warp - 1; warp != 0 && h < c_.heads; h += kWarps - 1) learner_.learn(h, s_.chosen[h], true);
  }

 private:
  /// Keys, or of those that equal `key` the complements of their tokens, in [low, low + span].
  struct Window {
    std::uint32_t low = 0;
    std::uint32_t span = 0;
    std::uint32_t key = 0;
    bool ties = false;
    [[nodiscard]] __device__ std::uint32_t value(const Candidate& candidate) const {
      return (ties ? ~candidate.token : candidate.key) - low;
    }
    [[nodiscard]] __device__ bool has(const Candidate& candidate) const {
      return value(candidate) <= span && (!ties || candidate.key == key);
    }
  };

  static __device__ void wait_for_quarter(std::uint32_t quarter) {
    asm volatile("bar.sync %0, %1;" ::"r"(quarter + 1), "n"(kQuarter) : "memory");
  }

  template <class Set>
  __device__ void choose(QuarterShared& s, std::uint32_t quarter, std::uint32_t h, const Set& set) {
    const std::uint32_t found = learner_.found(h);
    Candidate* const gathered = reinterpret_cast<Candidate*>(memory_) + quarter * room_;
    std::uint32_t* const buckets =
        reinterpret_cast<std::uint32_t*>(memory_ + marks_) - (quarter + 1) * kBuckets;
    const Window all = gather(s, quarter, h, found, gathered);
    const Candidate kth = kth_of(s, quarter, all, gathered, found, buckets);
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x % kQuarter; i < found; i += kQuarter) {
      const Candidate candidate = gathered[i];
      if (candidate.key > kth.key || (candidate.key == kth.key && candidate.token <= kth.token)) set(candidate.token);
    }
    if (threadIdx.x % kQuarter == 0)
      s_.chosen[h] = {.kth = foresight::score_of(kth.key),
                      .least = foresight::score_of(all.low),
                      .found = found,
                      .picks = c_.picks};
  }

  /// Candidates come to shared memory; returns the window of their keys.
  __device__ Window gather(QuarterShared& s, std::uint32_t quarter, std::uint32_t h, std::uint32_t found,
                           Candidate* gathered) const {
    if (threadIdx.x % kQuarter == 0) {
      s.least = kAll;
      s.largest = 0;
    }
    wait_for_quarter(quarter);  // What the head before this one has left has been read, too.
    const Candidate* const from = learner_.candidates(h);
    std::uint32_t least = kAll;
    std::uint32_t largest = 0;
#pragma unroll 8
    for (std::uint32_t i = threadIdx.x % kQuarter; i < found; i += kQuarter) {
      const Candidate candidate = from[i];
      gathered[i] = candidate;
      least = min(least, candidate.key);
      largest = max(largest, candidate.key);
    }
    least = __reduce_min_sync(kAll, least);
    largest = __reduce_max_sync(kAll, largest);
    if (threadIdx.x % kWarp == 0) {
      atomicMin(&s.least, least);
      atomicMax(&s.largest, largest);
    }
    wait_for_quarter(quarter);
    return {.low = s.least, .span = s.largest - s.least};
  }

  /// The candidate of rank `picks`: buckets, and buckets of these, say which few it is one of, and these are ranked each
  /// against all others. Of equal keys the older token comes first.
  __device__ Candidate kth_of(QuarterShared& s, std::uint32_t quarter, Window window, const Candidate* gathered,
                              std::uint32_t found, std::uint32_t* buckets) const {
    std::uint32_t rank = c_.picks - 1;
#pragma unroll 1
    for (std::uint32_t left = found; left > kQuarter;) {
      if (window.span == 0)
        window = {.low = ~(c_.end - 1), .span = c_.end - 1 - c_.begin, .key = window.low, .ties = true};
      const auto bits = static_cast<std::uint32_t>(32 - __clz(static_cast<int>(window.span)));
      constexpr std::uint32_t kBits = 10;
      static_assert(kBuckets == 1u << kBits);
      const std::uint32_t shift = bits > kBits ? bits - kBits : 0;
      count(quarter, window, shift, gathered, found, buckets);
      find_bucket(s, quarter, buckets, rank);
      left = s.left;
      rank = s.rank;
      window.low += s.bucket << shift;
      window.span = min(window.span - (s.bucket << shift), (1u << shift) - 1);
    }
    return ranked(s, quarter, window, gathered, found, rank);
  }

  __device__ void count(std::uint32_t quarter, const Window& window, std::uint32_t shift, const Candidate* gathered,
                        std::uint32_t found, std::uint32_t* buckets) const {
    const std::uint32_t thread = threadIdx.x % kQuarter;
    for (std::uint32_t i = thread; i < kBuckets / 4; i += kQuarter) reinterpret_cast<uint4*>(buckets)[i] = {};
    wait_for_quarter(quarter);
#pragma unroll 1
    for (std::uint32_t i = thread; i < found; i += kQuarter) {
      const Candidate candidate = gathered[i];
      if (window.has(candidate)) atomicAdd(&buckets[window.value(candidate) >> shift], 1u);
    }
    wait_for_quarter(quarter);
  }

  /// The bucket of what has that rank becomes s.bucket, its rank there s.rank, and s.left how many are in it.
  __device__ void find_bucket(QuarterShared& s, std::uint32_t quarter, const std::uint32_t* buckets,
                              std::uint32_t rank) const {
    constexpr std::uint32_t kOwn = kBuckets / kQuarter;
    const std::uint32_t thread = threadIdx.x % kQuarter;
    const std::uint32_t warp = thread / kWarp;
    const std::uint32_t top = kBuckets - 1 - kOwn * thread;  // The first threads have the largest.
    std::uint32_t own = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kOwn; ++i) own += buckets[top - i];
    const std::uint32_t inclusive = top_k::inclusive_sum(own);
    if (threadIdx.x % kWarp == kWarp - 1) s.warps[warp] = inclusive;
    wait_for_quarter(quarter);
    std::uint32_t before = inclusive - own;
#pragma unroll
    for (std::uint32_t w = 0; w < kQuarterWarps; ++w) before += w < warp ? s.warps[w] : 0;
    if (before <= rank && rank < before + own) {  // True for one thread.
      std::uint32_t bucket = top;
      while (before + buckets[bucket] <= rank) before += buckets[bucket--];
      s.bucket = bucket;
      s.rank = rank - before;
      s.left = buckets[bucket];
    }
    wait_for_quarter(quarter);
  }

  /// Of the candidates in the window, no more than threads, the one with that rank.
  __device__ Candidate ranked(QuarterShared& s, std::uint32_t quarter, const Window& window,
                              const Candidate* gathered, std::uint32_t found, std::uint32_t rank) const {
    const std::uint32_t thread = threadIdx.x % kQuarter;
    if (thread == 0) s.fews = 0;
    wait_for_quarter(quarter);
#pragma unroll 1
    for (std::uint32_t i = thread; i < found; i += kQuarter) {
      if (window.has(gathered[i])) s.few[atomicAdd(&s.fews, 1u)] = gathered[i];
    }
    wait_for_quarter(quarter);
    const std::uint32_t fews = s.fews;
    if (thread < fews) {
      const Candidate mine = s.few[thread];
      std::uint32_t before = 0;
#pragma unroll 4
      for (std::uint32_t i = 0; i < fews; ++i) {
        const Candidate other = s.few[i];
        before += other.key > mine.key || (other.key == mine.key && other.token < mine.token) ? 1 : 0;
      }
      if (before == rank) s.kth = mine;
    }
    wait_for_quarter(quarter);
    return s.kth;
  }

  AloneShared& s_;
  std::byte* memory_;
  std::uint32_t marks_ = 0;  ///< where in it marks begin, behind the buckets
  std::uint32_t room_ = 0;   ///< for candidates of a head
  const Learner learner_;    ///< A copy: what a function that is called points to would lie on its caller's stack.
  const Choices c_;
};

}  // namespace sluice::gpu::forward
