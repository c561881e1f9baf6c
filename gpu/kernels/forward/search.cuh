#pragma once

#include "gpu/kernels/forward/cut.cuh"
#include "gpu/kernels/forward/levels.cuh"

/// The k-th largest of a whole row, by a cluster of thread blocks that count its keys into buckets, pass by pass: for
/// rows whose candidates are too many or too few.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kPivots = 3;

struct ReachShared {
  alignas(16) std::uint32_t warps[2][kPivots][kWarps];  ///< sums; passes take turns, so that one barrier each is enough
};

/// How many keys reach each of some pivots, none of which is 0.
struct Reach {
  std::uint32_t of[kPivots] = {};
  __device__ void add(std::uint32_t key, const std::uint32_t (&pivots)[kPivots]) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) of[p] += key >= pivots[p] ? 1 : 0;
  }
};

class RowSearch {
 public:
  static constexpr std::uint32_t kWords = 2 * kBuckets;  ///< passes take turns with them

  /// @param counts  shared memory of kWords
  __device__ RowSearch(CutShared& s, std::uint32_t* counts, const Part& part, const Choices& choices)
      : s_(s), counts_(counts), part_(part), c_(choices) {}

  /// What a head chooses, of whose keys at least as many reach `least`. All threads of all blocks.
  __device__ __noinline__ Cut cut_of(std::uint32_t h, std::uint32_t least) {
    return cut_by_error(c_, h, RowTokens<RowSearch>{*this, part_, c_, h, least});
  }
  /// The k largest of these.
  __device__ __noinline__ Cut cut_at(std::uint32_t h, std::uint32_t least, std::uint32_t k) {
    // What the search before this one has left has been read, and the cut that this one takes the place of.
    detail::cluster_sync();
    if (k >= c_.end - c_.begin) return Cut::all();
    const Kth kth = search({.head = h}, least, kAll - least, k);
    const bool drawn = c_.drawn != nullptr;
    if (kth.ties == kth.equal && !drawn) return {.key = kth.value, .tie = 0};
    const Kth last =
        search({.head = h, .ties = true, .key = kth.value}, ~(c_.end - 1), c_.end - 1 - c_.begin, kth.ties);
    Cut cut{.key = kth.value, .tie = last.value - (drawn ? 0 : 1)};  // No token comes twice.
    if (drawn) cut.ahead = least_taken(h, cut);
    return cut;
  }

 private:
  /// The least key of all blocks' that a cut takes.
  __device__ std::uint32_t least_taken(std::uint32_t h, const Cut& cut) {
    std::uint32_t least = kAll;
    for_each_key(part_, c_, h, [&](std::uint32_t key, std::uint32_t token) {
      if (cut.takes(key, token)) least = min(least, key);
    });
    least = __reduce_min_sync(kAll, least);
    __syncthreads();
    if (threadIdx.x == 0) s_.ahead = kAll;
    __syncthreads();
    if (threadIdx.x % kWarp == 0) atomicMin(&s_.ahead, least);
    detail::cluster_sync();
    for (std::uint32_t b = 0; b < part_.blocks(); ++b)
      least = min(least, detail::load_in_cluster(detail::address_in(&s_.ahead, b)));
    detail::cluster_sync();  // All have read what the next search writes to.
    return least;
  }

  /// What all blocks search together: a head's keys or, of those equal to `key`, the complements of their tokens.
  struct Query {
    std::uint32_t head = 0;
    bool ties = false;
    std::uint32_t key = 0;
    [[nodiscard]] __device__ std::uint32_t value(std::uint32_t k, std::uint32_t token) const {
      return !ties ? k : k == key ? ~token : 0;
    }
  };
  /// The k-th largest value; `ties` of those equal to it, which are `equal`, belong to the k largest.
  struct Kth {
    std::uint32_t value = 0;
    std::uint32_t ties = 0;
    std::uint32_t equal = 0;
  };

  /// Among values from `low` on, none of which is more than `span` larger.
  __device__ Kth search(const Query& query, std::uint32_t low, std::uint32_t span, std::uint32_t k) {
    __syncthreads();  // What the search before this one has found has been read.
    if (threadIdx.x == 0) s_.rank = k - 1;
#pragma unroll 1
    while (true) {
      const auto bits = static_cast<std::uint32_t>(32 - __clz(static_cast<int>(span)));
      const std::uint32_t shift = bits > kBucketBits ? bits - kBucketBits : 0;
      count(query, low, span, shift);
      find_bucket(s_);
      low += s_.bucket << shift;
      if (shift == 0) return {.value = low, .ties = s_.rank + 1, .equal = s_.buckets[s_.bucket]};
      span = (1u << shift) - 1;
    }
  }

  /// The cluster's values in each bucket, to each block.
  __device__ void count(const Query& query, std::uint32_t low, std::uint32_t span, std::uint32_t shift) {
    std::uint32_t* const own = counts_ + turn_++ % 2 * kBuckets;
    for (std::uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) own[i] = 0;
    __syncthreads();
    for_each_key(part_, c_, query.head, [&](std::uint32_t key, std::uint32_t token) {
      const std::uint32_t value = query.value(key, token);
      if (value >= low && value - low <= span) atomicAdd(own + (value - low >> shift), 1u);
    });
    detail::cluster_sync();
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) {
      std::uint32_t sum = 0;
      for (std::uint32_t b = 0; b < part_.blocks(); ++b) sum += detail::load_in_cluster(detail::address_in(own + i, b));
      s_.buckets[i] = sum;
    }
    __syncthreads();
  }

  CutShared& s_;
  std::uint32_t* const counts_;
  const Part part_;  // Copies: what a function that is called points to would lie on its caller's stack.
  const Choices c_;
  std::uint32_t turn_ = 0;
};

}  // namespace sluice::gpu::forward
