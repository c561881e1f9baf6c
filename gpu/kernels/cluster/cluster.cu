// K-means: which centroid is nearest to each key. The nearest centroid has the largest k.c - |c|^2 / 2. A thread block
// keeps 128 keys in registers, 32 per warp, as rows of the products and walks over tiles of 32 centroids, which are the
// columns; keys are exact in their own type, centroids are the sum of two terms of it. No product leaves the registers.

#include <cmath>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"

namespace sluice::gpu {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowTiles = 2;  ///< of 16 keys, per warp
constexpr int kKeys = 16 * kRowTiles * kWarps;
constexpr int kCentroids = 32;
constexpr int kTerms = 2;
constexpr int kStages = 2;

/// Rows of head_dim elements in shared memory. Piece c (16 bytes) of row r lies at c ^ (r % 8), which keeps the eight
/// rows of a matrix in different banks.
template <int kDim>
struct Rows {
  static constexpr int kPieces = kDim / 8;
  static constexpr std::uint64_t kBytes = 2 * kDim;
  [[nodiscard]] static __device__ int at(int row, int piece) { return row * kPieces + (piece ^ (row % 8)); }
};

/// The keys, at first, and then the tiles of centroids [stage][term][centroid].
template <int kDim>
struct Memory {
  uint4 rows[kStages * kTerms * kCentroids * Rows<kDim>::kPieces];
  float half_norms[kStages][kCentroids];
};
static_assert(kStages * kTerms * kCentroids == kKeys);

/// The centroids that a thread's four rows (g and g + 8 of both row tiles) have found so far.
struct Found {
  float closeness[kRowTiles][2];
  std::uint32_t centroid[kRowTiles][2];
};

template <int kDim>
__device__ void load_keys(Memory<kDim>& memory, const ClusterItem& item, std::uint32_t first,
                          std::uint32_t (&keys)[kRowTiles][kDim / 16][4]) {
  using R = Rows<kDim>;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * R::kPieces; i += kThreads) {
    const int row = i / R::kPieces;
    const int piece = i % R::kPieces;
    const bool valid = first + row < item.count;
    const std::uint64_t key = valid ? first + row : 0;
    detail::copy_async(&memory.rows[R::at(row, piece)], item.keys + key * R::kBytes + piece * 16, valid);
  }
  detail::commit_copies();
  detail::wait_copies<0>();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int row = (warp * kRowTiles + m) * 16 + lane % 16;
      detail::load_matrices(keys[m][step], &memory.rows[R::at(row, 2 * step + lane / 16)]);
    }
  }
  __syncthreads();  // The centroids overwrite the keys.
}

/// Starts copying a tile of centroids; what the last one has not is 0, infinitely far away.
template <int kDim>
__device__ void copy_centroids(Memory<kDim>& memory, const ClusterItem& item, std::uint32_t tile) {
  using R = Rows<kDim>;
  const int stage = static_cast<int>(tile % kStages);
  const std::uint32_t first = tile * kCentroids;
  uint4* const rows = memory.rows + stage * kTerms * kCentroids * R::kPieces;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kTerms * kCentroids * R::kPieces; i += kThreads) {
    const int piece = i % R::kPieces;
    const int term = i / R::kPieces % kTerms;  // Both terms of a centroid lie next to each other in memory.
    const int row = i / R::kPieces / kTerms;
    const bool valid = first + row < item.clusters;
    const std::uint64_t from = valid ? (first + row) * std::uint64_t{kTerms} + term : 0;
    detail::copy_async(&rows[R::at(term * kCentroids + row, piece)], item.terms + from * R::kBytes + piece * 16, valid);
  }
  if (threadIdx.x < kCentroids) {
    const std::uint32_t centroid = first + threadIdx.x;
    memory.half_norms[stage][threadIdx.x] = centroid < item.clusters ? item.half_norms[centroid] : INFINITY;
  }
}

/// A tile of centroids, two columns of products (16 centroids) at a time.
template <class T, int kDim>
__device__ void meet_centroids(const Memory<kDim>& memory, std::uint32_t tile,
                               const std::uint32_t (&keys)[kRowTiles][kDim / 16][4], Found& found) {
  using R = Rows<kDim>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int stage = static_cast<int>(tile % kStages);
  const uint4* const rows = memory.rows + stage * kTerms * kCentroids * R::kPieces;
#pragma unroll
  for (int n = 0; n < kCentroids / 8; n += 2) {
    float products[kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
        std::uint32_t b[4];
        const int row = term * kCentroids + (n + lane / 16) * 8 + lane % 8;
        detail::load_matrices(b, &rows[R::at(row, 2 * step + lane / 8 % 2)]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          detail::mma<T>(products[m][0], keys[m][step], b[0], b[1]);
          detail::mma<T>(products[m][1], keys[m][step], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int column = 0; column < 2; ++column) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = (n + column) * 8 + 2 * (lane % 4) + e;
        const float half_norm = memory.half_norms[stage][at];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float closeness = products[m][column][2 * half + e] - half_norm;
            if (closeness > found.closeness[m][half]) {  // Not if NaN. Centroids rise, so the first of equals stays.
              found.closeness[m][half] = closeness;
              found.centroid[m][half] = tile * kCentroids + at;
            }
          }
        }
      }
    }
  }
}

/// Unites what the four lanes of a row found, and books the row's key.
__device__ void settle_rows(const ClusterItem& item, std::uint32_t first, std::uint32_t iteration, Found& found) {
  const std::uint32_t lane = threadIdx.x % 32;
  bool changed = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float closeness = found.closeness[m][half];
      std::uint32_t centroid = found.centroid[m][half];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(detail::kAllLanes, closeness, step);
        const std::uint32_t others = __shfl_xor_sync(detail::kAllLanes, centroid, step);
        if (other > closeness || (other == closeness && others < centroid)) {
          closeness = other;
          centroid = others;
        }
      }
      const std::uint32_t key = first + (threadIdx.x / 32 * kRowTiles + m) * 16 + 8 * half + lane / 4;
      if (lane % 4 == 0 && key < item.count) {
        changed |= item.assignment[key] != centroid;
        item.assignment[key] = centroid;
        atomicAdd(&item.offsets[std::uint64_t{centroid} * item.chunks + key / item.chunk_keys], 1u);
      }
    }
  }
  if (changed) item.changed[iteration] = 1;
}

/// blockIdx.y is the item, blockIdx.x its block of keys.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 3)
    assign_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t iteration) {
  __shared__ Memory<kDim> memory;
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t first = blockIdx.x * kKeys;
  if (first >= item.count || iteration >= item.iterations) return;
  if (iteration != 0 && item.changed[iteration - 1] == 0) return;

  std::uint32_t keys[kRowTiles][kDim / 16][4];
  load_keys<kDim>(memory, item, first, keys);
  Found found;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      found.closeness[m][half] = -INFINITY;
      found.centroid[m][half] = 0;
    }
  }
  const std::uint32_t tiles = (item.clusters + kCentroids - 1) / kCentroids;
  copy_centroids(memory, item, 0);
  detail::commit_copies();
  for (std::uint32_t tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) copy_centroids(memory, item, tile + 1);
    detail::commit_copies();  // An empty group behind the last tile, so that the wait below always means this one.
    detail::wait_copies<1>();
    __syncthreads();
    meet_centroids<T, kDim>(memory, tile, keys, found);
    __syncthreads();  // All warps are done with the tile that the next copies overwrite.
  }
  settle_rows(item, first, iteration, found);
}

template <class Use>
void with_kernel(const ClusterShape& shape, const Use& use) {
  if (shape.dtype == DType::f16) {
    shape.head_dim == 64 ? use(assign_kernel<__half, 64>) : use(assign_kernel<__half, 128>);
  } else {
    shape.head_dim == 64 ? use(assign_kernel<__nv_bfloat16, 64>) : use(assign_kernel<__nv_bfloat16, 128>);
  }
}

}  // namespace

void launch_cluster(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                    cudaStream_t stream) {
  launch_cluster_begin(items, extent, shape, stream);
  const dim3 grid((extent.count + kKeys - 1) / kKeys, items.count);
  for (std::uint32_t iteration = 0; iteration < extent.iterations; ++iteration) {
    with_kernel(shape, [&](auto* kernel) { kernel<<<grid, kThreads, 0, stream>>>(items, iteration); });
    check(cudaGetLastError(), "launch the kernel that finds the nearest centroids");
    launch_cluster_sort(items, extent, iteration, stream);
    launch_cluster_update(items, extent, shape, iteration, stream);
  }
  launch_cluster_end(items, extent, shape, stream);
}

void load_cluster_kernels() {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) {
      with_kernel({.dtype = dtype, .head_dim = head_dim}, [](auto* kernel) {
        load_kernel(kernel, "load the kernels that find the nearest centroids");
      });
    }
  }
  load_cluster_sort_kernels();
  load_cluster_update_kernels();
}

}  // namespace sluice::gpu
