// Top-p of rows that are held on chip, keys in registers and weights in shared memory: by one thread block or, of longer
// rows, by a cluster whose blocks add up what they find through distributed shared memory (compute capability 9.0).
#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/block_cluster.cuh"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/top_p.cuh"

namespace sluice::gpu {
namespace {

using namespace top_p;

constexpr std::uint32_t kMostBlocks = 16;  ///< of a cluster, where the device allows it
constexpr std::uint32_t kMostHeld = 36;    ///< keys of a thread

/// Blocks that share a row. Sums are rounded in the order of their parts, so it is a matter of the row alone, not of
/// others in the launch.
__host__ __device__ constexpr std::uint32_t blocks_of(std::uint32_t count) {
  std::uint32_t blocks = 1;
  while (blocks * kMostHeld * kThreads < count) blocks *= 2;
  return blocks;
}
/// Keys of each of their threads.
__host__ __device__ constexpr std::uint32_t held_by(std::uint32_t count, std::uint32_t blocks) {
  return (count + blocks * kThreads - 1) / (blocks * kThreads);
}
constexpr std::uint32_t shared_bytes(std::uint32_t held) { return held * kThreads * sizeof(float); }

/// Passes take turns, so that one barrier each is enough: the next but one writes after the next one's, when all have
/// read.
template <class Found>
struct Parts {
  Found warps[2][kWarps];        ///< of this block
  Found blocks[2][kMostBlocks];  ///< of all blocks, in each
};

struct Shared {
  TopPRow row;
  Parts<Sums> sums;
  Parts<Range> ranges;
  std::uint32_t kept;   ///< of this block
  std::uint32_t total;  ///< of all; the first block's counts
};

/// A row of which each block has the same number of neighbouring values, and of these each thread every kThreads-th.
class HeldRow {
 public:
  __device__ HeldRow(Shared& s, float* weights, std::uint32_t blocks)
      : s_(s),
        weights_(weights + threadIdx.x),
        blocks_(blocks),
        rank_(detail::cluster_rank()),
        held_(held_by(s.row.count, blocks)) {
    const std::uint32_t first = rank_ * held_ * kThreads + threadIdx.x;
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      const std::uint32_t at = first + i * kThreads;
      keys_[i] = weighed_key(is_choice(s.row, at) ? __ldg(s.row.values + at) : __int_as_float(0xff80'0000));
    }
  }
  [[nodiscard]] __device__ std::uint32_t thread() const { return rank_ * kThreads + threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return blocks_ * kThreads; }
  __device__ Range range() const {
    Range range;
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      range.add(keys_[i]);
    }
    return range;
  }
  __device__ void weigh(std::uint32_t top) {
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      weights_[i * kThreads] = weight_of(keys_[i], top, s_.row.softcap);
    }
  }
  __device__ Sums weights(const std::uint32_t (&pivots)[kPivots]) const {
    Sums sums;
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      sums.add(keys_[i], weights_[i * kThreads], pivots);
    }
    return sums;
  }
  __device__ Sums counts(const std::uint32_t (&pivots)[kPivots]) const {
    Sums sums;
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      sums.add(keys_[i], 1.f, pivots);
    }
    return sums;
  }
  __device__ Sums reduce(const Sums& sums, std::uint32_t turn) { return over_blocks(s_.sums, sums, turn); }
  __device__ Range reduce(const Range& range, std::uint32_t turn) { return over_blocks(s_.ranges, range, turn); }

  /// Writes the mask; how many of this block's values are in it becomes s.kept. Through shared memory, in the place of
  /// the weights, so that it leaves in whole lines.
  __device__ void write_mask(std::uint32_t low) {
    auto* const words = reinterpret_cast<std::uint32_t*>(weights_ - threadIdx.x);
    __syncthreads();  // The weights have been read.
#pragma unroll
    for (std::uint32_t i = 0; i < kMostHeld; ++i) {
      if (i >= held_) break;
      const std::uint32_t bits = __ballot_sync(kAll, keys_[i] > low);
      if (threadIdx.x % kWarp == 0) words[i * kWarps + threadIdx.x / kWarp] = bits;
    }
    __syncthreads();
    const std::uint32_t first = rank_ * held_ * kWarps;
    const std::uint32_t all = (s_.row.count + kWarp - 1) / kWarp;
    std::uint32_t kept = 0;
    for (std::uint32_t word = threadIdx.x; word < held_ * kWarps && first + word < all; word += kThreads) {
      s_.row.mask[first + word] = words[word];
      kept += static_cast<std::uint32_t>(__popc(static_cast<int>(words[word])));
    }
    kept = __reduce_add_sync(kAll, kept);
    if (threadIdx.x % kWarp == 0 && kept != 0) atomicAdd(&s_.kept, kept);
  }

 private:
  /// What all threads of all blocks have found, the same for each of them, in an order that does not depend on timing.
  template <class Found>
  __device__ Found over_blocks(Parts<Found>& parts, const Found& found, std::uint32_t turn) {
    const std::uint32_t warp = threadIdx.x / kWarp;
    const std::uint32_t lane = threadIdx.x % kWarp;
    const Found own = over_lanes(found);
    if (lane == 0) parts.warps[turn % 2][warp] = own;
    __syncthreads();
    if (blocks_ == 1) return over_lanes(parts.warps[turn % 2][lane]);
    if (warp == 0) {
      const Found block = over_lanes(parts.warps[turn % 2][lane]);
      if (lane < blocks_) store(&parts.blocks[turn % 2][rank_], lane, block);
    }
    // A block writes to the others' memory before this turn's barrier; they have read what lay there before the last
    // turn's.
    detail::cluster_sync();
    Found all = parts.blocks[turn % 2][0];
    for (std::uint32_t b = 1; b < blocks_; ++b) all = both(all, parts.blocks[turn % 2][b]);
    return all;
  }
  template <class Found>
  static __device__ void store(const Found* own, std::uint32_t block, const Found& found) {
    static_assert(sizeof(Found) % sizeof(std::uint32_t) == 0);
    std::uint32_t words[sizeof(Found) / sizeof(std::uint32_t)];
    memcpy(words, &found, sizeof(Found));
    const std::uint32_t there = detail::address_in(own, block);
#pragma unroll
    for (std::uint32_t w = 0; w < std::size(words); ++w) detail::store_in_cluster(there + w * sizeof(std::uint32_t), words[w]);
  }

  Shared& s_;
  std::uint32_t keys_[kMostHeld];
  float* weights_;  ///< this thread's, kThreads apart
  std::uint32_t blocks_;
  std::uint32_t rank_;
  std::uint32_t held_;
};

/// A cluster for each row, of which those blocks stay that share it.
__global__ void __launch_bounds__(kThreads) top_p_held_kernel(const __grid_constant__ TaskArray<TopPRow> rows) {
  extern __shared__ float weights[];
  __shared__ Shared s;
  detail::wait_for_kernel_before();
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x / detail::cluster_blocks()];
    s.kept = s.total = 0;
  }
  __syncthreads();
  const std::uint32_t blocks = blocks_of(s.row.count);
  const bool first = detail::cluster_rank() == 0;
  if (detail::cluster_rank() >= blocks) return;
  if (s.row.count == 0) {
    if (threadIdx.x == 0 && s.row.kept != nullptr) *s.row.kept = 0;
    return;
  }
  if (blocks > 1) detail::cluster_sync();  // All of them have begun: their memory is there to be written to.
  HeldRow row(s, weights, blocks);
  row.write_mask(cut(row, s.row));
  __syncthreads();
  if (blocks > 1) {
    if (threadIdx.x == 0) detail::add_in_cluster(detail::address_in(&s.total, 0), s.kept);
    detail::cluster_sync();
  } else if (threadIdx.x == 0) {
    s.total = s.kept;
  }
  if (threadIdx.x == 0 && first && s.row.kept != nullptr) *s.row.kept = s.total;
}

/// Dynamic shared memory that a thread block may have, on the current device.
std::uint32_t largest_shared() {
  int device = 0;
  int bytes = 0;
  cudaFuncAttributes attributes{};
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "ask for shared memory");
  check(cudaFuncGetAttributes(&attributes, top_p_held_kernel), "load the top_p kernel of rows held on chip");
  return static_cast<std::uint32_t>(bytes) - static_cast<std::uint32_t>(attributes.sharedSizeBytes);
}

}  // namespace

void launch_top_p_held(const TaskArray<TopPRow>& rows, std::uint32_t longest, cudaStream_t stream) {
  const std::uint32_t blocks = blocks_of(longest);
  // A shorter row that one block less may hold has more keys for each thread.
  const std::uint32_t held = blocks == 1 ? held_by(longest, 1) : kMostHeld;
  OverlappingLaunch(rows.count * blocks, kThreads, shared_bytes(held), stream, blocks)
      .run(top_p_held_kernel, "launch the top_p kernel of rows held on chip", rows);
}

std::uint32_t load_top_p_held_kernel() {
  const std::uint32_t held = std::min(kMostHeld, largest_shared() / shared_bytes(1));
  check(cudaFuncSetAttribute(top_p_held_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes(held))),
        "give the top_p kernel shared memory");
  if (held < kMostHeld || compiled_for() < Compiled::clusters) return held * kThreads;
  check(cudaFuncSetAttribute(top_p_held_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "allow the top_p kernel larger clusters");
  std::uint32_t blocks = kMostBlocks;
  while (blocks > 1 && ClusterLaunch(1, blocks, kThreads, shared_bytes(held)).at_once(top_p_held_kernel) == 0)
    blocks /= 2;
  return blocks * held * kThreads;
}

}  // namespace sluice::gpu
