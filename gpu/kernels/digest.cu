#include "gpu/cuda_error.hpp"
#include "gpu/kernels/digest.hpp"
#include "gpu/kernels/elements.cuh"

namespace sluice::gpu {
namespace {

using detail::kElementBytes;
using detail::kUnit;

/// One warp per page: head_dim up to 256 is at most 32 units of 8 columns.
constexpr std::uint32_t kThreads = 32;

/// Eight columns of a page's keys.
struct Columns {
  const std::byte* k;
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

struct Box {
  float hi[kUnit];
  float lo[kUnit];
};

/// The comparisons keep the old value if the new one is NaN, as the CPU's do: NaN in the first row makes the column's
/// box NaN, NaN in a later row is ignored.
template <DType kType>
__device__ __forceinline__ Box box_of(const Columns& columns) {
  Box box;
  detail::load_unit<kType>(columns.k, box.hi);
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) box.lo[c] = box.hi[c];
#pragma unroll 8
  for (std::uint32_t r = 1; r < columns.rows; ++r) {
    float k[kUnit];
    detail::load_unit<kType>(columns.k + r * columns.row_bytes, k);
#pragma unroll
    for (std::uint32_t c = 0; c < kUnit; ++c) {
      box.hi[c] = k[c] > box.hi[c] ? k[c] : box.hi[c];
      box.lo[c] = k[c] < box.lo[c] ? k[c] : box.lo[c];
    }
  }
  return box;
}

/// Centre of the box +- mean distance from it (ArkVale, eq. 4), inside the box. Each operation rounds like the CPU's,
/// so that both sides store the same bits; the intrinsics are not contracted.
template <DType kType>
__device__ __forceinline__ void shrink_to_mean(const Columns& columns, Box& box) {
  float centre[kUnit];
  float distance[kUnit];
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) {
    centre[c] = __fmaf_rn(box.hi[c], 0.5f, __fmul_rn(box.lo[c], 0.5f));
    distance[c] = 0.f;
  }
#pragma unroll 8
  for (std::uint32_t r = 0; r < columns.rows; ++r) {
    float k[kUnit];
    detail::load_unit<kType>(columns.k + r * columns.row_bytes, k);
#pragma unroll
    for (std::uint32_t c = 0; c < kUnit; ++c) distance[c] = __fadd_rn(distance[c], fabsf(__fsub_rn(k[c], centre[c])));
  }
  const float share = __fdiv_rn(1.f, static_cast<float>(columns.rows));
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) {
    const float radius = __fmul_rn(distance[c], share);
    const float hi = __fadd_rn(centre[c], radius);
    const float lo = __fsub_rn(centre[c], radius);
    box.hi[c] = hi < box.hi[c] ? hi : box.hi[c];
    box.lo[c] = lo > box.lo[c] ? lo : box.lo[c];
  }
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    digest_kernel(const __grid_constant__ TaskArray<DigestTask> tasks, DigestKind kind, PageLayout layout) {
  __shared__ DigestTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  if (threadIdx.x >= layout.head_dim / kUnit) return;
  const std::uint32_t row_bytes = layout.head_dim * kElementBytes<kType>;
  const std::uint32_t at = threadIdx.x * kUnit * kElementBytes<kType>;
  const Columns columns{.k = task.page + at, .rows = layout.page_tokens, .row_bytes = row_bytes};
  Box box = box_of<kType>(columns);
  if (kind == DigestKind::cuboid_mean) shrink_to_mean<kType>(columns, box);
  detail::store_unit<kType>(task.out + at, box.hi);
  detail::store_unit<kType>(task.out + row_bytes + at, box.lo);
}

}  // namespace

void launch_digest(const TaskArray<DigestTask>& tasks, DigestKind kind, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  if (layout.dtype == DType::bf16) {
    digest_kernel<DType::bf16><<<tasks.count, kThreads, 0, stream>>>(tasks, kind, layout);
  } else {
    digest_kernel<DType::f16><<<tasks.count, kThreads, 0, stream>>>(tasks, kind, layout);
  }
  check(cudaGetLastError(), "launch the digest kernel");
}

void load_digest_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, digest_kernel<DType::f16>), "load the digest kernel for f16 pages");
  check(cudaFuncGetAttributes(&attributes, digest_kernel<DType::bf16>), "load the digest kernel for bf16 pages");
}

}  // namespace sluice::gpu
