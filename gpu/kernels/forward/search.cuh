#pragma once

#include "gpu/kernels/forward/part.cuh"

/// The k-th largest of a whole row, by a cluster of thread blocks that count, pass by pass, how many keys reach some
/// pivots: for rows whose candidates are too many or too few.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kPivots = 3;

struct SearchShared {
  alignas(16) std::uint32_t warps[2][kPivots][kWarps];  ///< sums; passes take turns, so that one barrier each is enough
  std::uint32_t blocks[2][kPivots][kMostBlocks];
};

/// How many keys reach each of some pivots, none of which is 0.
struct Reach {
  std::uint32_t of[kPivots] = {};
  __device__ void add(std::uint32_t key, const std::uint32_t (&pivots)[kPivots]) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) of[p] += key >= pivots[p] ? 1 : 0;
  }
};

/// Query heads of a row, each of which chooses `picks` of the tokens [begin, end).
struct Choices {
  const float* scores = nullptr;  ///< [heads, stride] of token 0 on
  std::uint32_t stride = 0;
  std::uint32_t heads = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t picks = 0;
  std::uint32_t first = 0;  ///< head: the others are counted from it

  [[nodiscard]] __device__ float score(std::uint32_t h, std::uint32_t token) const {
    return __ldg(scores + std::uint64_t{first + h} * stride + token);
  }
  [[nodiscard]] __device__ std::uint32_t key_of(std::uint32_t h, std::uint32_t token) const {
    return order_key(score(h, token));
  }
  [[nodiscard]] __device__ bool between(std::uint32_t token) const { return token >= begin && token < end; }
};

class RowSearch {
 public:
  __device__ RowSearch(SearchShared& s, const Part& part, const Choices& choices) : s_(s), part_(part), c_(choices) {}

  /// What a head chooses. All threads of all blocks.
  __device__ __noinline__ Cut cut_of(std::uint32_t h) {
    detail::cluster_sync();  // What the search before this one has left has been read.
    Query query{.head = h};
    Kth kth{.ties = c_.picks, .equal = c_.end - c_.begin};
#pragma unroll 1
    while (true) {
      kth = search(query, kth.equal, kth.ties);
      // No token comes twice: a pivot is found that as many reach.
      if (query.ties) return {.key = query.key, .tie = kth.key};
      if (kth.ties == 0) return {.key = kth.key, .tie = kAll};
      if (kth.ties == kth.equal) return {.key = kth.key, .tie = 0};
      query.ties = true;
      query.key = kth.key;
    }
  }

 private:
  /// What all blocks search together: a head's keys or, of those equal to `key`, the complements of their tokens.
  struct Query {
    std::uint32_t head = 0;
    bool ties = false;
    std::uint32_t key = 0;
    [[nodiscard]] __device__ std::uint32_t value(std::uint32_t k, std::uint32_t token) const {
      return !ties ? k : k == key ? ~token : 0;
    }
  };
  /// The k-th largest value, or one between it and the next: `ties` of those equal to `key` belong to the k largest,
  /// of `equal`.
  struct Kth {
    std::uint32_t key = 0;
    std::uint32_t ties = 0;
    std::uint32_t equal = 0;
  };

  /// Among `all` values.
  __device__ Kth search(const Query& query, std::uint32_t all, std::uint32_t k) {
    std::uint64_t low = 0;
    std::uint64_t high = std::uint64_t{1} << 32;
    std::uint32_t reach_low = all;
    std::uint32_t above = 0;  // That reach `high`.
#pragma unroll 1
    while (high - low > 1) {
      std::uint32_t pivots[kPivots];
      const std::uint64_t step = (high - low + kPivots) / (kPivots + 1);
#pragma unroll
      for (std::uint32_t p = 0; p < kPivots; ++p)
        pivots[p] = static_cast<std::uint32_t>(min(low + (p + 1) * step, high - 1));
      const Reach reach = count(query, pivots);
#pragma unroll
      for (std::uint32_t p = 0; p < kPivots; ++p) {
        if (reach.of[p] == k) return {.key = pivots[p] - 1, .ties = 0, .equal = 0};
        if (reach.of[p] > k && pivots[p] > low) {
          low = pivots[p];
          reach_low = reach.of[p];
        } else if (reach.of[p] < k && pivots[p] < high) {
          high = pivots[p];
          above = reach.of[p];
        }
      }
    }
    return {.key = static_cast<std::uint32_t>(low), .ties = k - above, .equal = reach_low - above};
  }

  __device__ Reach count(const Query& query, const std::uint32_t (&pivots)[kPivots]) {
    Reach own;
#pragma unroll 4
    for (std::uint32_t i = threadIdx.x; i < part_.count(); i += kThreads) {
      const std::uint32_t token = part_.token_of(i);
      if (c_.between(token)) own.add(query.value(c_.key_of(query.head, token), token), pivots);
    }
    return sum_of_cluster(own);
  }

  __device__ Reach sum_of_cluster(const Reach& own) {
    const std::uint32_t turn = turn_++ % 2;
    const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      const std::uint32_t sum = __reduce_add_sync(kAll, own.of[p]);
      if (lane == 0) s_.warps[turn][p][threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      const std::uint32_t mine = __reduce_add_sync(kAll, lane < kWarps ? s_.warps[turn][p][lane] : 0);
      if (threadIdx.x < part_.blocks())
        detail::store_in_cluster(detail::address_in(&s_.blocks[turn][p][part_.rank()], threadIdx.x), mine);
    }
    detail::cluster_sync();
    Reach all;
    for (std::uint32_t b = 0; b < part_.blocks(); ++b) {
#pragma unroll
      for (std::uint32_t p = 0; p < kPivots; ++p) all.of[p] += s_.blocks[turn][p][b];
    }
    return all;
  }

  SearchShared& s_;
  const Part part_;  // Copies: what a function that is called points to would lie on its caller's stack.
  const Choices c_;
  std::uint32_t turn_ = 0;
};

}  // namespace sluice::gpu::forward
