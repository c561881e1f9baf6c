// K-means: where the centroids begin and where they move. One warp per cluster adds up its keys, in the order that
// cluster_sort.cu gives them: the same bits in every run.

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/kernels/cluster/cluster_warps.cuh"
#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"
#include "sluice/step/page.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::gpu {
namespace {

using namespace k_means;
using detail::kAllLanes;

/// Thread blocks per item of kernels that loop.
constexpr std::uint32_t kMaxBlocks = 1024;

/// Eight elements of a key where it lies, as 16 bits each; `piece` counts them.
template <DType kType, std::uint32_t kDim>
__device__ __forceinline__ uint4 load_piece(const ClusterItem& item, std::uint32_t token, std::uint32_t piece) {
  const std::uint64_t frame = item.frames[token / item.page_tokens];
  const std::uint32_t row = token % item.page_tokens;
  if constexpr (detail::kScaled<kType>) {
    const PageLayout layout{.page_tokens = item.page_tokens, .head_dim = kDim, .dtype = kType};
    const std::byte* const page = item.base + frame * layout.page_bytes();
    const float scale = *reinterpret_cast<const float*>(page + layout.scales_offset() + row * layout.scale_bytes());
    return detail::unfold_codes(*reinterpret_cast<const uint2*>(page + row * kDim + piece * 8), scale);
  } else {
    return *reinterpret_cast<const uint4*>(item.base + (frame * 2 * item.page_tokens + row) * (2 * kDim) + piece * 16);
  }
}

/// Copies the keys out of their pages, where they may be far away; kPieces lanes per key.
template <DType kType, std::uint32_t kDim>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ TaskArray<ClusterItem> items) {
  constexpr std::uint32_t kPieces = kDim / detail::kUnit;
  constexpr std::uint32_t kRows = kThreads / kPieces;
  constexpr std::uint32_t kExponents = kType == DType::f16 ? 0x7c00'7c00u : 0x7f80'7f80u;
  constexpr std::uint32_t kNaNs = 0x7fff'7fffu;
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t piece = threadIdx.x % kPieces;
  // All lanes take part in every turn, because they vote.
  for (std::uint32_t first = blockIdx.x * kRows; first < item.count; first += gridDim.x * kRows) {
    const std::uint32_t key = min(first + threadIdx.x / kPieces, item.count - 1);
    uint4 words = load_piece<kType, kDim>(item, item.skip + key, piece);
    std::uint32_t bad = 0;
    for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) {
      const std::uint32_t exponents = word & kExponents;
      bad |= (exponents & 0xffffu) == (kExponents & 0xffffu) || exponents >> 16 == kExponents >> 16;
    }
#pragma unroll
    for (std::uint32_t step = kPieces / 2; step > 0; step /= 2) bad |= __shfl_xor_sync(kAllLanes, bad, step);
    if (bad != 0) words = make_uint4(kNaNs, kNaNs, kNaNs, kNaNs);
    *reinterpret_cast<uint4*>(item.keys + std::uint64_t{key} * (2 * kDim) + piece * 16) = words;
    if (piece == 0) item.assignment[key] = ~0u;
  }
}

/// What a lane holds of a row: kDim / 32 elements next to each other.
template <std::uint32_t kDim>
inline constexpr std::uint32_t kWords = kDim / 64;

template <DType kType, std::uint32_t kDim>
__device__ __forceinline__ void load_part(const std::byte* row, float (&part)[2 * kWords<kDim>]) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(row) + threadIdx.x % kWarp * kWords<kDim>;
#pragma unroll
  for (std::uint32_t i = 0; i < kWords<kDim>; ++i) {
    const float2 pair = detail::widen_word<kType>(words[i]);
    part[2 * i] = pair.x;
    part[2 * i + 1] = pair.y;
  }
}

/// A warp writes a centroid in all its forms.
template <DType kType, std::uint32_t kDim>
__device__ void write_centroid(const ClusterItem& item, std::uint32_t cluster, const float (&part)[2 * kWords<kDim>]) {
  using T = detail::Element<kType>;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t word = lane * kWords<kDim>;
  auto* const high = reinterpret_cast<std::uint32_t*>(item.terms) + std::uint64_t{cluster} * kDim + word;
  auto* const low = high + kDim / 2;
  float* const centroid = item.centroids + std::uint64_t{cluster} * kDim + 2 * word;
  float norm = 0.f;
#pragma unroll
  for (std::uint32_t i = 0; i < kWords<kDim>; ++i) {
    const detail::Terms terms = detail::split<T>(part[2 * i], part[2 * i + 1]);
    high[i] = terms.high;
    low[i] = terms.low;
    centroid[2 * i] = part[2 * i];
    centroid[2 * i + 1] = part[2 * i + 1];
    // The norm of what the products see. NaN is added apart, because `split` may lose it.
    const float a = detail::low_of<T>(terms.high) + detail::low_of<T>(terms.low);
    const float b = detail::high_of<T>(terms.high) + detail::high_of<T>(terms.low);
    norm += a * a + b * b;
    if (part[2 * i] != part[2 * i] || part[2 * i + 1] != part[2 * i + 1]) norm = NAN;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) norm += __shfl_xor_sync(kAllLanes, norm, step);
  if (lane == 0) item.half_norms[cluster] = 0.5f * norm;
}

__device__ __forceinline__ void clear_offsets(const ClusterItem& item, std::uint32_t cluster) {
  for (std::uint32_t i = threadIdx.x % kWarp; i < item.chunks; i += kWarp) {
    item.offsets[std::uint64_t{cluster} * item.chunks + i] = 0;
  }
}

/// A warp per cluster.
template <DType kType, std::uint32_t kDim>
__global__ void __launch_bounds__(kThreads) begin_kernel(const __grid_constant__ TaskArray<ClusterItem> items) {
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t cluster = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (blockIdx.x == 0) {
    for (std::uint32_t i = threadIdx.x; i < item.iterations; i += kThreads) item.changed[i] = 0;
  }
  if (cluster >= item.clusters) return;
  float part[2 * kWords<kDim>];
  load_part<kType, kDim>(item.keys + std::uint64_t{permuted(cluster, item.count, item.seed)} * (2 * kDim), part);
  write_centroid<kType, kDim>(item, cluster, part);
  clear_offsets(item, cluster);
}

/// A warp per cluster moves its centroid to the mean of its keys, and clears its offsets for the next iteration.
template <DType kType, std::uint32_t kDim>
__global__ void __launch_bounds__(kThreads)
    move_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t iteration) {
  constexpr std::uint32_t kPart = 2 * kWords<kDim>;
  const ClusterItem& item = items[blockIdx.y];
  const std::uint32_t cluster = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (cluster >= item.clusters || !moves(item, iteration)) return;
  clear_offsets(item, cluster);
  const std::uint32_t end = item.starts[cluster + 1];
  double sum[kPart] = {};
  std::uint32_t counted = 0;
#pragma unroll 8
  for (std::uint32_t i = item.starts[cluster]; i < end; ++i) {
    float part[kPart];
    load_part<kType, kDim>(item.keys + std::uint64_t{item.members[i]} * (2 * kDim), part);
    const bool finite = part[0] == part[0];  // The same in all lanes: a row is NaN throughout or nowhere.
    counted += finite ? 1 : 0;
#pragma unroll
    for (std::uint32_t c = 0; c < kPart; ++c) sum[c] += finite ? static_cast<double>(part[c]) : 0.0;
  }
  if (counted == 0) return;
  float mean[kPart];
#pragma unroll
  for (std::uint32_t c = 0; c < kPart; ++c) mean[c] = static_cast<float>(sum[c] / counted);
  write_centroid<kType, kDim>(item, cluster, mean);
}

__global__ void __launch_bounds__(kThreads)
    end_kernel(const __grid_constant__ TaskArray<ClusterItem> items, std::uint32_t head_dim) {
  const ClusterItem& item = items[blockIdx.y];
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::uint64_t i = first; i < item.count && item.assignment_out != nullptr; i += step)
    item.assignment_out[i] = item.assignment[i];
  // The lists are those of the last iteration in which a key changed hands: the first one is such.
  for (std::uint64_t i = first; i < item.count && item.members_out != nullptr; i += step)
    item.members_out[i] = item.first + item.members[i];
  for (std::uint64_t i = first; i <= item.clusters && item.starts_out != nullptr; i += step)
    item.starts_out[i] = item.first + item.starts[i];
  const std::uint64_t floats = std::uint64_t{item.clusters} * head_dim;
  for (std::uint64_t i = first; i < floats; i += step) item.centroids_out[i] = item.centroids[i];
}

/// use.template operator()<kType, kDim>() for the shape; the caller has refused all others.
template <class Use>
void for_shape(const ClusterShape& shape, const Use& use) {
  if (shape.dtype == DType::bf16) {
    return shape.head_dim == 64 ? use.template operator()<DType::bf16, 64>()
                                : use.template operator()<DType::bf16, 128>();
  }
  return shape.head_dim == 64 ? use.template operator()<DType::f16, 64>() : use.template operator()<DType::f16, 128>();
}

}  // namespace

void launch_cluster_begin(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                          cudaStream_t stream) {
  for_shape(shape, [&]<DType kType, std::uint32_t kDim>() {
    dim3 grid = blocks(extent.count, kThreads / (kDim / detail::kUnit), items);
    grid.x = std::min(grid.x, kMaxBlocks);
    if (shape.scaled) {
      gather_kernel<DType::fp8_e4m3, kDim><<<grid, kThreads, 0, stream>>>(items);
    } else {
      gather_kernel<kType, kDim><<<grid, kThreads, 0, stream>>>(items);
    }
    check(cudaGetLastError(), "launch the kernel that gathers keys");
    begin_kernel<kType, kDim><<<blocks(extent.clusters, kWarps, items), kThreads, 0, stream>>>(items);
    check(cudaGetLastError(), "launch the kernel that chooses centroids");
  });
}

void launch_cluster_update(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                           std::uint32_t iteration, cudaStream_t stream) {
  for_shape(shape, [&]<DType kType, std::uint32_t kDim>() {
    move_kernel<kType, kDim><<<blocks(extent.clusters, kWarps, items), kThreads, 0, stream>>>(items, iteration);
  });
  check(cudaGetLastError(), "launch the kernel that moves centroids");
}

void launch_cluster_end(const TaskArray<ClusterItem>& items, const ClusterExtent& extent, const ClusterShape& shape,
                        cudaStream_t stream) {
  const std::uint64_t most = std::max<std::uint64_t>(extent.count, std::uint64_t{extent.clusters} * shape.head_dim);
  dim3 grid = blocks(most, kThreads, items);
  grid.x = std::min(grid.x, kMaxBlocks);
  end_kernel<<<grid, kThreads, 0, stream>>>(items, shape.head_dim);
  check(cudaGetLastError(), "launch the kernel that copies clusters");
}

void load_cluster_update_kernels() {
  const auto load = [](auto* kernel) {
    load_kernel(kernel, "load the kernels of k-means");
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) {
      for_shape({.dtype = dtype, .head_dim = head_dim}, [&]<DType kType, std::uint32_t kDim>() {
        load(gather_kernel<kType, kDim>);
        load(gather_kernel<DType::fp8_e4m3, kDim>);
        load(begin_kernel<kType, kDim>);
        load(move_kernel<kType, kDim>);
      });
    }
  }
  load(end_kernel);
}

}  // namespace sluice::gpu
