// Top-p of rows too long for one thread block: a cluster of thread blocks holds a row on chip, keys in registers and
// weights in shared memory, and adds up what its blocks find through distributed shared memory (compute capability
// 9.0).
#include <algorithm>
#include <cstddef>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/block_cluster.cuh"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/select/top_p.cuh"

namespace sluice::gpu {
namespace {

using namespace top_p;

constexpr std::uint32_t kPortableBlocks = 8;  ///< of a cluster on any device that has clusters
constexpr std::uint32_t kMostBlocks = 16;     ///< where the device allows it
/// Blocks that share a row which fewer could hold: 32 rows, a layer of a model, fill most of a device then.
constexpr std::uint32_t kUsualBlocks = 4;
constexpr std::uint32_t kMostHeld = 32;  ///< keys per thread

struct ClusterShared {
  TopPRow row;
  Found warps[2][kWarps];        ///< of this block; passes take turns, as in a single block
  Found blocks[2][kMostBlocks];  ///< of all blocks, in each
  std::uint32_t mask[kMostHeld * kWarps];
  std::uint32_t kept;   ///< of this block
  std::uint32_t total;  ///< of all; the first block's counts
};

/// A row of which each block of the cluster has kHeld * kThreads values, and of these each thread every kThreads-th.
template <std::uint32_t kHeld>
class ClusterRow {
 public:
  __device__ ClusterRow(ClusterShared& s, float* weights) : s_(s), weights_(weights + threadIdx.x) {
    const std::uint32_t first = detail::cluster_rank() * kHeld * kThreads + threadIdx.x;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t at = first + i * kThreads;
      keys_[i] = order_key(is_choice(s.row, at) ? __ldg(s.row.values + at) : __int_as_float(0xff80'0000));
    }
  }
  [[nodiscard]] __device__ std::uint32_t thread() const { return detail::cluster_rank() * kThreads + threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return detail::cluster_blocks() * kThreads; }
  __device__ Found range() const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) add_to_range(keys_[i], found);
    return found;
  }
  __device__ void weigh(std::uint32_t top) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) weights_[i * kThreads] = weight_of(keys_[i], top, s_.row.softcap);
  }
  __device__ Found pass(std::uint32_t middle) const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i)
      found.add(keys_[i], keys_[i] > middle ? weights_[i * kThreads] : 0.f, middle);
    return found;
  }
  __device__ Found count(std::uint32_t middle) const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) found.add(keys_[i], 1.f, middle);
    return found;
  }
  /// The sum over the cluster, in the order of its blocks, which each of them makes for itself. A block writes to the
  /// others' memory before this turn's barrier; they have read what lay there before the last turn's.
  __device__ Found reduce(Found found, std::uint32_t turn) {
    found = over_lanes(found);
    const std::uint32_t warp = threadIdx.x / kWarp;
    const std::uint32_t lane = threadIdx.x % kWarp;
    if (lane == 0) s_.warps[turn % 2][warp] = found;
    __syncthreads();
    const std::uint32_t blocks = detail::cluster_blocks();
    if (warp == 0) {
      found = over_lanes(s_.warps[turn % 2][lane]);
      if (lane < blocks) {
        const std::uint32_t there = detail::address_in(&s_.blocks[turn % 2][detail::cluster_rank()], lane);
        detail::store_in_cluster(there + offsetof(Found, mass), __float_as_uint(found.mass));
        detail::store_in_cluster(there + offsetof(Found, above), found.above);
        detail::store_in_cluster(there + offsetof(Found, below), found.below);
      }
    }
    detail::cluster_sync();
    found = s_.blocks[turn % 2][0];
    for (std::uint32_t i = 1; i < blocks; ++i) {
      const Found& other = s_.blocks[turn % 2][i];
      found.mass += other.mass;
      found.above = min(found.above, other.above);
      found.below = max(found.below, other.below);
    }
    return found;
  }
  __device__ void write_mask(std::uint32_t low) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t bits = __ballot_sync(kAll, keys_[i] > low);
      if (threadIdx.x % kWarp == 0) s_.mask[i * kWarps + threadIdx.x / kWarp] = bits;
    }
    __syncthreads();
    if (threadIdx.x >= kHeld * kWarps) return;
    const std::uint32_t word = detail::cluster_rank() * kHeld * kWarps + threadIdx.x;
    if (word >= (s_.row.count + kWarp - 1) / kWarp) return;
    s_.row.mask[word] = s_.mask[threadIdx.x];
    atomicAdd(&s_.kept, static_cast<std::uint32_t>(__popc(static_cast<int>(s_.mask[threadIdx.x]))));
  }

 private:
  ClusterShared& s_;
  std::uint32_t keys_[kHeld];
  float* weights_;  ///< this thread's, kThreads apart
};
static_assert(kMostHeld * kWarps <= kThreads, "one thread per word of the mask");

/// One cluster per row.
template <std::uint32_t kHeld>
__global__ void __launch_bounds__(kThreads) top_p_cluster_kernel(const __grid_constant__ TaskArray<TopPRow> rows) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ float weights[];
  __shared__ ClusterShared s;
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x / detail::cluster_blocks()];
    s.kept = s.total = 0;
  }
  detail::cluster_sync();  // All blocks have begun: their memory is there to be written to.
  if (s.row.count == 0) {  // For all of them.
    if (threadIdx.x == 0 && detail::cluster_rank() == 0 && s.row.kept != nullptr) *s.row.kept = 0;
    return;
  }
  ClusterRow<kHeld> row(s, weights);
  row.write_mask(cut(row, s.row));
  __syncthreads();
  if (threadIdx.x == 0) detail::add_in_cluster(detail::address_in(&s.total, 0), s.kept);
  detail::cluster_sync();
  if (threadIdx.x == 0 && detail::cluster_rank() == 0 && s.row.kept != nullptr) *s.row.kept = s.total;
#endif
}

template <class Use>
void with_kernel(std::uint32_t held, Use&& use) {
  if (held <= 8) {
    use(top_p_cluster_kernel<8>, 8u);
  } else if (held <= 16) {
    use(top_p_cluster_kernel<16>, 16u);
  } else {
    use(top_p_cluster_kernel<32>, 32u);
  }
}

/// Values of a row.
constexpr std::uint32_t held_by(std::uint32_t blocks) { return blocks * kMostHeld * kThreads; }
constexpr std::uint32_t shared_bytes(std::uint32_t held) { return held * kThreads * sizeof(float); }

}  // namespace

void launch_top_p_clusters(const TaskArray<TopPRow>& rows, std::uint32_t longest, cudaStream_t stream) {
  std::uint32_t blocks = kUsualBlocks;
  while (longest > held_by(blocks)) blocks *= 2;
  with_kernel(static_cast<std::uint32_t>(div_up(longest, blocks * kThreads)), [&](auto* kernel, std::uint32_t held) {
    const ClusterLaunch launch(rows.count, blocks, kThreads, shared_bytes(held), stream);
    check(cudaLaunchKernelEx(&launch.config(), kernel, rows), "launch the top_p kernel for clusters");
  });
}

std::uint32_t load_top_p_cluster_kernels() {
  if (compiled_for() < Compiled::clusters) return 0;  // The kernels are empty.
  std::uint32_t longest = held_by(kMostBlocks);
  for (const std::uint32_t held : {8u, 16u, kMostHeld}) {
    with_kernel(held, [&](auto* kernel, std::uint32_t) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, kernel), "load the top_p kernels for clusters");
      if (longest == 0) return;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes(held))),
            "give the top_p kernels for clusters shared memory");
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "allow the top_p kernels larger clusters");
      std::uint32_t blocks = kMostBlocks;
      while (blocks >= kPortableBlocks && ClusterLaunch(1, blocks, kThreads, shared_bytes(held)).at_once(kernel) == 0)
        blocks /= 2;
      longest = blocks < kPortableBlocks ? 0 : std::min(longest, held_by(blocks));
    });
  }
  return longest;
}

}  // namespace sluice::gpu
