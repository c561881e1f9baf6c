#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gpu/kernels/task_array.hpp"
#include "sluice/tensor.hpp"

namespace sluice::gpu {

/// One ClusterTask as the kernels see it. What follows `seed` lies in its scratch memory.
struct ClusterItem {
  const std::byte* base = nullptr;        ///< device or registered host memory, 16-byte aligned
  const std::uint32_t* frames = nullptr;  ///< of the pages from first / page_tokens on
  // As ClusterTask has them; all but the first may be null.
  float* centroids_out = nullptr;
  std::uint32_t* assignment_out = nullptr;
  std::uint32_t* members_out = nullptr;
  std::uint32_t* starts_out = nullptr;
  std::uint32_t first = 0;  ///< token of the first key
  std::uint32_t skip = 0;   ///< tokens of the first page before the first key
  std::uint32_t count = 0;
  std::uint32_t clusters = 0;
  std::uint32_t iterations = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t chunk_keys = 0;  ///< keys of one chunk of the counting sort, a multiple of 32
  std::uint32_t chunks = 0;
  std::uint64_t seed = 0;
  std::byte* keys = nullptr;            ///< [count, head_dim]; NaN throughout if not finite
  std::byte* terms = nullptr;           ///< [clusters, 2, head_dim]: each centroid as the sum of two rows
  float* centroids = nullptr;           ///< [clusters, head_dim]
  float* half_norms = nullptr;          ///< [clusters]
  std::uint32_t* assignment = nullptr;  ///< [count]
  std::uint32_t* members = nullptr;     ///< [count] keys by cluster, then by index
  std::uint32_t* offsets = nullptr;     ///< [clusters, chunks]: keys that a chunk has of a cluster; then where they go
  std::uint32_t* starts = nullptr;      ///< [clusters + 1]: how many keys a cluster has; then where its members begin
  std::uint32_t* changed = nullptr;     ///< [iterations]: 0 if no key changed hands
};

struct ClusterShape {
  DType dtype = DType::bf16;  ///< of keys, once they are gathered
  std::uint32_t head_dim = 128;
  bool scaled = false;  ///< they lie as E4m3 has them, and become bf16
};

/// What one launch of all items has to cover: the largest of each.
struct ClusterExtent {
  std::uint32_t count = 0;
  std::uint32_t clusters = 0;
  std::uint32_t chunks = 0;
  std::uint32_t iterations = 0;

  void cover(const ClusterItem& item) noexcept {
    count = std::max(count, item.count);
    clusters = std::max(clusters, item.clusters);
    chunks = std::max(chunks, item.chunks);
    iterations = std::max(iterations, item.iterations);
  }
};

/// Enqueues the whole clustering of all items, which have at least one key each.
void launch_cluster(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                    cudaStream_t stream);
void load_cluster_kernels();

/// The parts of `launch_cluster` in cluster_update.cu and cluster_sort.cu.
void launch_cluster_begin(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                          cudaStream_t stream);
/// Lists the keys of every cluster, if any changed hands in this iteration.
void launch_cluster_sort(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, std::uint32_t iteration,
                         cudaStream_t stream);
void launch_cluster_update(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                           std::uint32_t iteration, cudaStream_t stream);
void launch_cluster_end(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                        cudaStream_t stream);
void load_cluster_sort_kernels();
void load_cluster_update_kernels();

}  // namespace sluice::gpu
