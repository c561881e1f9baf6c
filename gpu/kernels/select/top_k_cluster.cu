// Top-k of rows too long for one thread block: a cluster of thread blocks holds a row's keys in registers and counts,
// pass by pass, how many reach three pivots at once, through distributed shared memory (compute capability 9.0).
// Counting needs no atomics, which scores that lie close together would queue up at.
#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/block_cluster.cuh"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/select/top_k.cuh"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

using namespace top_k;

constexpr std::uint32_t kPortableBlocks = 8;  ///< of a cluster on any device that has clusters
constexpr std::uint32_t kMostBlocks = 16;     ///< where the device allows it
/// Blocks that share a row which fewer could hold: 32 rows, a layer of a model, fill most of a device then.
constexpr std::uint32_t kUsualBlocks = 4;
constexpr std::uint32_t kMostHeld = 36;  ///< keys per thread; the usual blocks hold 131,072 tokens and some more
constexpr std::uint32_t kPivots = 3;

struct Counts {
  std::uint32_t of[kPivots] = {};
};

struct ClusterShared {
  TopKRow row;
  std::uint32_t warps[2][kPivots][kWarps];  ///< of this block; passes take turns, so that one barrier each is enough
  std::uint32_t blocks[2][kPivots][kMostBlocks];  ///< of all blocks, in each
  std::uint32_t above[kMostHeld * kWarps];        ///< bit per value: it is larger than the threshold
  std::uint32_t ties[kMostHeld * kWarps];         ///< or equal
  std::uint32_t warp_above[kWarps];
  std::uint32_t warp_ties[kWarps];
  std::uint32_t guess[2];  ///< the first block's, in each
};

/// The keys larger than `threshold` are chosen, and of those equal to it the first `ties` of the row.
struct Threshold {
  std::uint32_t key = 0;
  std::uint32_t ties = 0;
};

/// A row of which each block of the cluster has kHeld * kThreads values, and of these each thread every kThreads-th.
template <std::uint32_t kHeld>
class ClusterRow {
 public:
  __device__ explicit ClusterRow(ClusterShared& s) : s_(s) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t at = first() + i * kThreads + threadIdx.x;
      there_ |= std::uint64_t{at < s.row.count ? 1u : 0u} << i;
      keys_[i] = at < s.row.count ? order_key(__ldg(s.row.values + at)) : 0;
    }
  }

  /// The k-th largest key is sought between `low`, which enough keys reach, and `high`, which too few do. A pivot that
  /// exactly k keys reach ends the search early: nothing ties. A sample says where to begin.
  __device__ Threshold search() {
    const std::uint32_t k = s_.row.k;
    if (k == s_.row.count) return {.key = 0, .ties = k};
    std::uint64_t low = 0;
    std::uint64_t high = std::uint64_t{1} << 32;
    std::uint32_t above = 0;  // that reach `high`
    std::uint32_t pivots[kPivots];
    guess(pivots);
    while (true) {
      const Counts reach = reduce(count(pivots));
      for (std::uint32_t p = 0; p < kPivots; ++p) {
        if (reach.of[p] == k) return {.key = pivots[p] - 1, .ties = 0};
        if (reach.of[p] > k) {
          low = max(low, std::uint64_t{pivots[p]});
        } else if (pivots[p] < high) {
          high = pivots[p];
          above = reach.of[p];
        }
      }
      if (high - low <= 1) return {.key = static_cast<std::uint32_t>(low), .ties = k - above};
      const std::uint64_t step = (high - low + kPivots) / (kPivots + 1);
      for (std::uint32_t p = 0; p < kPivots; ++p)
        pivots[p] = static_cast<std::uint32_t>(min(low + (p + 1) * step, high - 1));
    }
  }

  /// Writes the indices of what is chosen, ascending.
  __device__ void write(const Threshold& threshold) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const bool there = (there_ >> i & 1) != 0;
      const std::uint32_t above = __ballot_sync(kAll, there && keys_[i] > threshold.key);
      const std::uint32_t ties = __ballot_sync(kAll, there && keys_[i] == threshold.key);
      if (threadIdx.x % kWarp != 0) continue;
      s_.above[i * kWarps + threadIdx.x / kWarp] = above;
      s_.ties[i * kWarps + threadIdx.x / kWarp] = ties;
    }
    __syncthreads();
    // What the blocks before this one chose, then a word of the block's values per thread, turn by turn.
    Counts own;
    for (std::uint32_t word = threadIdx.x; word < kHeld * kWarps; word += kThreads) {
      own.of[0] += __popc(s_.above[word]);
      own.of[1] += __popc(s_.ties[word]);
    }
    (void)reduce(own);
    const std::uint32_t last = (turn_ - 1) % 2;
    std::uint32_t above_before = 0;
    std::uint32_t ties_before = 0;
    for (std::uint32_t b = 0; b < detail::cluster_rank(); ++b) {
      above_before += s_.blocks[last][0][b];
      ties_before += s_.blocks[last][1][b];
    }
    for (std::uint32_t base = 0; base < kHeld * kWarps; base += kThreads)
      write_words(threshold, base + threadIdx.x, above_before, ties_before);
  }

 private:
  [[nodiscard]] __device__ static std::uint32_t first() { return detail::cluster_rank() * kHeld * kThreads; }

  [[nodiscard]] __device__ Counts count(const std::uint32_t (&pivots)[kPivots]) const {
    Counts counts;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
#pragma unroll
      for (std::uint32_t p = 0; p < kPivots; ++p) counts.of[p] += keys_[i] >= pivots[p] ? 1 : 0;
    }
    return counts;
  }

  /// Three keys around which the k-th largest lies, as one key of every thread of the first block suggests: where it
  /// would be among them, and some standard deviations to both sides.
  __device__ void guess(std::uint32_t (&pivots)[kPivots]) {
    constexpr float kDeviations = 3.f;
    if (detail::cluster_rank() == 0) {
      const auto sampled = static_cast<float>(min(s_.row.count, kThreads));
      const float rank = static_cast<float>(s_.row.k) / static_cast<float>(s_.row.count) * sampled;
      const float margin = kDeviations * sqrtf(rank * (1.f - rank / sampled)) + 1.f;
      const std::uint32_t lower = sample_of_rank(static_cast<std::uint32_t>(rank + margin) + 1);
      const std::uint32_t upper = rank > margin ? sample_of_rank(static_cast<std::uint32_t>(rank - margin)) : kAll;
      if (threadIdx.x < detail::cluster_blocks()) {
        const std::uint32_t there = detail::address_in(&s_.guess[0], threadIdx.x);
        detail::store_in_cluster(there, lower);
        detail::store_in_cluster(there + sizeof(std::uint32_t), upper);
      }
    }
    detail::cluster_sync();
    pivots[0] = max(s_.guess[0], 1u);
    pivots[2] = max(s_.guess[1], pivots[0]);
    pivots[1] = pivots[0] + (pivots[2] - pivots[0]) / 2;
  }

  /// The largest key that `rank` of the block's samples reach; 0 if there are fewer.
  __device__ std::uint32_t sample_of_rank(std::uint32_t rank) const {
    std::uint32_t key = 0;
    for (std::uint32_t bit = 1u << 31; bit != 0; bit /= 2) {
      const int reach = __syncthreads_count((there_ & 1) != 0 && keys_[0] >= (key | bit) ? 1 : 0);
      if (static_cast<std::uint32_t>(reach) >= rank) key |= bit;
    }
    return key;
  }

  /// `above_before` and `ties_before`: in what precedes the words of this turn; then of the next.
  __device__ void write_words(const Threshold& threshold, std::uint32_t word, std::uint32_t& above_before,
                              std::uint32_t& ties_before) {
    const std::uint32_t above = word < kHeld * kWarps ? s_.above[word] : 0;
    const std::uint32_t ties = word < kHeld * kWarps ? s_.ties[word] : 0;
    const std::uint32_t above_sum = inclusive_sum(__popc(above));
    const std::uint32_t ties_sum = inclusive_sum(__popc(ties));
    __syncthreads();  // The sums of the turn before have been read.
    if (threadIdx.x % kWarp == kWarp - 1) {
      s_.warp_above[threadIdx.x / kWarp] = above_sum;
      s_.warp_ties[threadIdx.x / kWarp] = ties_sum;
    }
    __syncthreads();
    std::uint32_t at = above_before + sum_before(s_.warp_above) + above_sum - __popc(above);
    std::uint32_t tie = ties_before + sum_before(s_.warp_ties) + ties_sum - __popc(ties);
    for (std::uint32_t bits = above | ties; bits != 0; bits &= bits - 1) {
      const std::uint32_t lowest = bits & (0u - bits);
      const bool ties_here = (ties & lowest) != 0;
      if (!ties_here || tie < threshold.ties)
        s_.row.out[at + min(tie, threshold.ties)] = first() + word * kWarp + __ffs(static_cast<int>(lowest)) - 1;
      at += ties_here ? 0 : 1;
      tie += ties_here ? 1 : 0;
    }
    above_before += __reduce_add_sync(kAll, s_.warp_above[threadIdx.x % kWarp]);
    ties_before += __reduce_add_sync(kAll, s_.warp_ties[threadIdx.x % kWarp]);
  }

  /// Sums over the cluster. A block writes to the others' memory before this turn's barrier; they have read what lay
  /// there before the last turn's.
  __device__ Counts reduce(const Counts& mine) {
    const std::uint32_t turn = turn_++ % 2;
    const std::uint32_t warp = threadIdx.x / kWarp;
    const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      const std::uint32_t sum = __reduce_add_sync(kAll, mine.of[p]);
      if (lane == 0) s_.warps[turn][p][warp] = sum;
    }
    __syncthreads();
    const std::uint32_t blocks = detail::cluster_blocks();
    if (warp < kPivots) {
      const std::uint32_t sum = __reduce_add_sync(kAll, s_.warps[turn][warp][lane]);
      if (lane < blocks)
        detail::store_in_cluster(detail::address_in(&s_.blocks[turn][warp][detail::cluster_rank()], lane), sum);
    }
    detail::cluster_sync();
    Counts all;
    for (std::uint32_t b = 0; b < blocks; ++b) {
#pragma unroll
      for (std::uint32_t p = 0; p < kPivots; ++p) all.of[p] += s_.blocks[turn][p][b];
    }
    return all;
  }

  ClusterShared& s_;
  std::uint32_t keys_[kHeld];
  std::uint64_t there_ = 0;  ///< bit per key
  std::uint32_t turn_ = 0;
};
static_assert(kMostHeld <= 64, "one bit per key");

/// One cluster per row.
template <std::uint32_t kHeld>
__global__ void __launch_bounds__(kThreads) top_k_cluster_kernel(const __grid_constant__ TaskArray<TopKRow> rows) {
#if __CUDA_ARCH__ >= 900
  __shared__ ClusterShared s;
  if (threadIdx.x == 0) s.row = rows[blockIdx.x / detail::cluster_blocks()];
  detail::cluster_sync();    // All blocks have begun: their memory is there to be written to.
  if (s.row.k == 0) return;  // For all of them.
  ClusterRow<kHeld> row(s);
  row.write(row.search());
  detail::cluster_sync();  // None leaves while another may read what it was sent, or write to it.
#endif
}

template <class Use>
void with_kernel(std::uint32_t held, Use&& use) {
  if (held <= 8) {
    use(top_k_cluster_kernel<8>, 8u);
  } else if (held <= 16) {
    use(top_k_cluster_kernel<16>, 16u);
  } else {
    use(top_k_cluster_kernel<kMostHeld>, kMostHeld);
  }
}

/// Values of a row.
constexpr std::uint32_t held_by(std::uint32_t blocks) { return blocks * kMostHeld * kThreads; }

}  // namespace

void launch_top_k_clusters(const TaskArray<TopKRow>& rows, std::uint32_t longest, cudaStream_t stream) {
  std::uint32_t blocks = kUsualBlocks;
  while (longest > held_by(blocks)) blocks *= 2;
  with_kernel(static_cast<std::uint32_t>(div_up(longest, blocks * kThreads)), [&](auto* kernel, std::uint32_t) {
    const ClusterLaunch launch(rows.count, blocks, kThreads, 0, stream);
    check(cudaLaunchKernelEx(&launch.config(), kernel, rows), "launch the top_k kernel for clusters");
  });
}

std::uint32_t load_top_k_cluster_kernels() {
  if (compiled_for() < Compiled::clusters) return 0;  // The kernels are empty.
  std::uint32_t longest = held_by(kMostBlocks);
  for (const std::uint32_t held : {8u, 16u, kMostHeld}) {
    with_kernel(held, [&](auto* kernel, std::uint32_t) {
      load_kernel(kernel, "load the top_k kernels for clusters");
      if (longest == 0) return;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "allow the top_k kernels larger clusters");
      std::uint32_t blocks = kMostBlocks;
      while (blocks >= kPortableBlocks && ClusterLaunch(1, blocks, kThreads, 0).at_once(kernel) == 0) blocks /= 2;
      longest = blocks < kPortableBlocks ? 0 : std::min(longest, held_by(blocks));
    });
  }
  return longest;
}

}  // namespace sluice::gpu
