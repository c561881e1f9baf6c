#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/select/top_k.cuh"

namespace sluice::gpu {
namespace {

using namespace top_k;

/// Loads that a thread has in flight while the row is read for the first time.
constexpr std::uint32_t kInFlight = 8;

/// The threshold is found digit by digit, from the top: 11, 11 and 10 bits of the key.
constexpr std::uint32_t kBuckets = 2048;
constexpr std::uint32_t kDigits = 3;
struct Digit {
  std::uint32_t shift;
  std::uint32_t bits;
};
__host__ __device__ constexpr Digit digit(std::uint32_t i) {
  return i == 0 ? Digit{21, 11} : i == 1 ? Digit{10, 11} : Digit{0, 10};
}
static_assert(kBuckets == 2 * kThreads, "rank_bucket gives every thread two buckets");

/// Results up to here are collected in shared memory, in place of the buckets, and leave as whole lines.
constexpr std::uint32_t kCollected = kBuckets;

struct Shared {
  TopKRow row;
  std::uint32_t buckets[kBuckets];
  std::uint32_t warp_sums[kWarps];
  std::uint32_t warp_ties[kWarps];
  std::uint32_t bucket;  ///< what rank_bucket found
  std::uint32_t rank;    ///< and the rank within that bucket
};

/// Keys of a row: kept in shared memory if they fit, else made again from the values.
struct Keys {
  const float* values;
  const std::uint32_t* kept;  ///< null: made again
  __device__ __forceinline__ std::uint32_t operator[](std::uint32_t i) const {
    return kept != nullptr ? kept[i] : order_key(values[i]);
  }
};

/// Reads the row, counts the keys by their first digit, and keeps them if there is room.
__device__ void read_row(Shared& s, std::uint32_t* kept) {
  const std::uint32_t count = s.row.count;
  const float* const values = s.row.values;
  for (std::uint32_t base = threadIdx.x; base < count; base += kInFlight * kThreads) {
    float value[kInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads < count) value[i] = __ldg(values + base + i * kThreads);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads >= count) break;
      const std::uint32_t key = order_key(value[i]);
      if (kept != nullptr) kept[base + i * kThreads] = key;
      atomicAdd(&s.buckets[key >> digit(0).shift], 1u);
    }
  }
}

/// Finds the bucket with the rank-th largest key (s.rank, from 1) and its rank there, and clears the buckets. All
/// threads see s.bucket and s.rank afterwards.
__device__ void rank_bucket(Shared& s) {
  // Thread t looks after the pair of buckets with the t-th largest keys.
  const std::uint32_t upper = kBuckets - 1 - 2 * threadIdx.x;
  const std::uint32_t rank = s.rank;
  const std::uint32_t in_upper = s.buckets[upper];
  const std::uint32_t in_both = in_upper + s.buckets[upper - 1];
  s.buckets[upper] = 0;
  s.buckets[upper - 1] = 0;
  const std::uint32_t sum = inclusive_sum(in_both);
  if (threadIdx.x % kWarp == kWarp - 1) s.warp_sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const std::uint32_t end = sum_before(s.warp_sums) + sum;
  const std::uint32_t begin = end - in_both;
  if (begin < rank && rank <= end) {  // true for one thread
    const bool first = rank <= begin + in_upper;
    s.bucket = first ? upper : upper - 1;
    s.rank = first ? rank - begin : rank - begin - in_upper;
  }
  __syncthreads();
}

/// The k-th largest key; s.rank becomes the number of keys equal to it that belong to the k largest.
__device__ std::uint32_t find_threshold(Shared& s, const Keys& keys) {
  rank_bucket(s);
  std::uint32_t prefix = s.bucket;
#pragma unroll
  for (std::uint32_t d = 1; d < kDigits; ++d) {
    constexpr std::uint32_t kOne = 1;
    const Digit now = digit(d);
    const std::uint32_t count = s.row.count;
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const std::uint32_t key = keys[i];
      if (key >> (now.shift + now.bits) == prefix) {
        atomicAdd(&s.buckets[(key >> now.shift) & ((kOne << now.bits) - 1)], kOne);
      }
    }
    __syncthreads();
    rank_bucket(s);
    prefix = prefix << now.bits | s.bucket;
  }
  return prefix;
}

/// Keys above the threshold and keys equal to it.
struct Counts {
  std::uint32_t above = 0;
  std::uint32_t ties = 0;
};

/// Consecutive entries of one warp; `end` exceeds the row for the last ones.
struct Segment {
  std::uint32_t begin;
  std::uint32_t end;
};

__device__ Counts count_segment(const Keys& keys, std::uint32_t count, Segment segment, std::uint32_t threshold) {
  Counts counts;
  for (std::uint32_t base = segment.begin; base < segment.end; base += kWarp) {
    const std::uint32_t i = base + threadIdx.x % kWarp;
    const std::uint32_t key = i < count ? keys[i] : 0;
    counts.above += __popc(__ballot_sync(kAll, i < count && key > threshold));
    counts.ties += __popc(__ballot_sync(kAll, i < count && key == threshold));
  }
  return counts;
}

/// Writes the indices of a warp's selected entries to their places. `before`: what precedes the segment. Of the ties
/// the first `ties` of the row are selected.
__device__ void write_segment(const Keys& keys, std::uint32_t count, Segment segment, std::uint32_t threshold,
                              std::uint32_t ties, Counts before, std::uint32_t* out) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t lower_lanes = (1u << lane) - 1;
  for (std::uint32_t base = segment.begin; base < segment.end; base += kWarp) {
    const std::uint32_t i = base + lane;
    const std::uint32_t key = i < count ? keys[i] : 0;
    const bool above = i < count && key > threshold;
    const bool tie = i < count && key == threshold;
    const std::uint32_t all_above = __ballot_sync(kAll, above);
    const std::uint32_t all_ties = __ballot_sync(kAll, tie);
    const std::uint32_t above_before = before.above + __popc(all_above & lower_lanes);
    const std::uint32_t ties_before = before.ties + __popc(all_ties & lower_lanes);
    if (above || (tie && ties_before < ties)) out[above_before + min(ties_before, ties)] = i;
    before.above += __popc(all_above);
    before.ties += __popc(all_ties);
  }
}

__global__ void __launch_bounds__(kThreads)
    top_k_kernel(const __grid_constant__ TaskArray<TopKRow> rows, std::uint32_t room) {
  extern __shared__ std::uint32_t memory[];
  __shared__ Shared s;
  for (std::uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) s.buckets[i] = 0;
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x];
    s.rank = s.row.k;
  }
  __syncthreads();
  const std::uint32_t count = s.row.count;
  const std::uint32_t k = s.row.k;
  if (k == 0) return;
  std::uint32_t* const kept = count <= room ? memory : nullptr;
  read_row(s, kept);
  __syncthreads();
  const Keys keys{.values = s.row.values, .kept = kept};
  const std::uint32_t threshold = find_threshold(s, keys);
  const std::uint32_t ties = s.rank;

  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t per_warp = ((count + kWarps - 1) / kWarps + kWarp - 1) / kWarp * kWarp;
  const Segment segment{.begin = min(warp * per_warp, count), .end = min((warp + 1) * per_warp, count)};
  const Counts own = count_segment(keys, count, segment, threshold);
  if (threadIdx.x % kWarp == 0) {
    s.warp_sums[warp] = own.above;
    s.warp_ties[warp] = own.ties;
  }
  __syncthreads();
  const Counts before{.above = sum_before(s.warp_sums), .ties = sum_before(s.warp_ties)};
  std::uint32_t* const out = k <= kCollected ? s.buckets : s.row.out;
  write_segment(keys, count, segment, threshold, ties, before, out);
  if (k > kCollected) return;
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < k; i += kThreads) s.row.out[i] = s.buckets[i];
}

/// Dynamic shared memory of one thread block at most, on the current device.
std::uint32_t largest_shared() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "ask for shared memory");
  return static_cast<std::uint32_t>(bytes) - static_cast<std::uint32_t>(sizeof(Shared));
}

void launch_rows(const TaskArray<TopKRow>& rows, std::uint32_t longest, std::uint32_t most_of_clusters,
                 cudaStream_t stream) {
  if (rows.count == 0) return;
  // A row that one block's shared memory holds needs no cluster, whose barriers take longer.
  const std::uint32_t held = largest_shared() / static_cast<std::uint32_t>(sizeof(std::uint32_t));
  if (longest > held && longest <= most_of_clusters) return launch_top_k_clusters(rows, longest, stream);
  const std::uint32_t room = std::min(longest, held);
  top_k_kernel<<<rows.count, kThreads, room * sizeof(std::uint32_t), stream>>>(rows, room);
  check(cudaGetLastError(), "launch the top_k kernel");
}

}  // namespace

void launch_top_k(const TaskArray<TopKRow>& rows, std::uint32_t most_of_clusters, cudaStream_t stream) {
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < rows.count; ++i) longest = std::max(longest, rows[i].count);
  launch_rows(rows, longest, most_of_clusters, stream);
}

void launch_top_k(const TopKRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_of_clusters,
                  cudaStream_t stream) {
  TaskArray<TopKRow> array;
  array.queued = rows;
  array.count = count;
  launch_rows(array, longest, most_of_clusters, stream);
}

void load_top_k_kernels() {
  load_kernel(top_k_kernel, "load the top_k kernel", largest_shared());
}

}  // namespace sluice::gpu
