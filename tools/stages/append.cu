#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "tools/stages/append.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

using detail::kElementBytes;
using detail::kUnit;

constexpr std::uint32_t kThreads = 256;

/// Rows of K or of V, and where they go.
struct Rows {
  const std::byte* from;
  std::uint64_t stride_bytes;
  std::byte* to;
};

/// All threads of the block; `units` of 8 elements a row. Numbers of the page's own type keep their bits when they are
/// widened and narrowed again; a NaN stays one.
template <DType kFrom, DType kTo>
__device__ void copy_rows(const Rows& rows, std::uint32_t count, std::uint32_t units) {
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(rows.from) | rows.stride_bytes) & 15) == 0;
  for (std::uint32_t i = threadIdx.x; i < count * units; i += kThreads) {
    const std::uint32_t row = i / units;
    const std::byte* const from = rows.from + row * rows.stride_bytes + (i % units) * kUnit * kElementBytes<kFrom>;
    float values[kUnit];
    if (aligned) {
      detail::load_unit<kFrom>(from, values);
    } else {
#pragma unroll
      for (std::uint32_t c = 0; c < kUnit; ++c) {
        values[c] = detail::load_element<kFrom>(from + c * kElementBytes<kFrom>);
      }
    }
    detail::store_unit<kTo>(rows.to + std::uint64_t{i} * kUnit * kElementBytes<kTo>, values);
  }
}

template <DType kTo>
__device__ void copy_rows(DType from, const Rows& rows, std::uint32_t count, std::uint32_t units) {
  switch (from) {
    case DType::f32: return copy_rows<DType::f32, kTo>(rows, count, units);
    case DType::f16: return copy_rows<DType::f16, kTo>(rows, count, units);
    case DType::bf16: return copy_rows<DType::bf16, kTo>(rows, count, units);
    case DType::fp8_e4m3: break;  // No tensor has it.
  }
}

/// blockIdx.x is the task; blockIdx.y the half, 0 for K and 1 for V.
template <DType kTo>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ TaskArray<AppendTask> tasks, PageLayout layout) {
  __shared__ AppendTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  const std::uint32_t half = blockIdx.y;
  const std::uint64_t row_bytes = std::uint64_t{layout.head_dim} * kElementBytes<kTo>;
  const std::uint64_t half_bytes = row_bytes * layout.page_tokens;
  const Rows rows{.from = half == 0 ? task.k : task.v,
                  .stride_bytes = task.token_stride * (task.dtype == DType::f32 ? 4 : 2),
                  .to = task.page + task.first_row * row_bytes + half * half_bytes};
  copy_rows<kTo>(task.dtype, rows, task.count, layout.head_dim / kUnit);
}

}  // namespace

void launch_append(const TaskArray<AppendTask>& tasks, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  const dim3 grid(tasks.count, 2);
  if (layout.dtype == DType::bf16) {
    append_kernel<DType::bf16><<<grid, kThreads, 0, stream>>>(tasks, layout);
  } else {
    append_kernel<DType::f16><<<grid, kThreads, 0, stream>>>(tasks, layout);
  }
  check(cudaGetLastError(), "launch the append kernel");
}

void load_append_kernels() {
  load_kernel(append_kernel<DType::f16>, "load the append kernel for f16 pages");
  load_kernel(append_kernel<DType::bf16>, "load the append kernel for bf16 pages");
}

}  // namespace sluice::tools
