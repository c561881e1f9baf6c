#include "gpu/cuda_error.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/int4.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kAll = 0xffff'ffffu;
constexpr std::uint32_t kCodesPerWord = 8;

__device__ __forceinline__ float warp_min(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = fminf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

/// Scale and zero of a row, before they are rounded. The same operations in the same order as on the CPU, without
/// contraction: the copies are equal bit by bit.
struct Params {
  float scale, zero;
};
__device__ __forceinline__ Params params_of(float least, float most) {
  float scale = __fdiv_rn(__fsub_rn(most, least), static_cast<float>(Int4Layout::kLevels));
  scale = scale < Int4Layout::kSmallest ? Int4Layout::kSmallest : scale;
  scale = scale < Int4Layout::kLargest ? scale : Int4Layout::kLargest;
  float zero = least > -Int4Layout::kLargest ? least : -Int4Layout::kLargest;
  zero = zero < Int4Layout::kLargest ? zero : Int4Layout::kLargest;
  return {scale, __fadd_rn(zero, 0.f)};
}

__device__ __forceinline__ std::uint32_t code_of(float x, float zero, float inverse) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr auto kTop = static_cast<float>(Int4Layout::kLevels);
  float code = __fmul_rn(__fsub_rn(x, zero), inverse);
  code = code > 0.f ? code : 0.f;  // NaN too
  code = code < kTop ? code : kTop;
  return __float_as_uint(__fadd_rn(code, kRound)) & 15u;
}

/// One thread block per page, one warp per row at a time, one word of codes per lane.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ TaskArray<QuantizeTask> tasks, Int4Layout layout) {
  __shared__ QuantizeTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t words = layout.words();
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.rows; row += kThreads / kWarp) {
    const std::byte* const k = task.page + std::uint64_t{row} * layout.head_dim * 2;
    float x[kCodesPerWord] = {};
    float least = __int_as_float(0x7f80'0000);
    float most = -least;
    bool nan = false;
    if (lane < words) {
#pragma unroll
      for (std::uint32_t n = 0; n < kCodesPerWord; ++n) {
        x[n] = detail::load_element<kType>(k + (n * words + lane) * 2);
        least = fminf(least, x[n]);
        most = fmaxf(most, x[n]);
        nan |= x[n] != x[n];
      }
    }
    Params params = params_of(warp_min(least), -warp_min(-most));
    if (__any_sync(kAll, nan)) params = {__uint_as_float(0x7fc0'0000u), __uint_as_float(0x7fc0'0000u)};
    const std::uint32_t stored =
        detail::narrow_f16(params.scale) | static_cast<std::uint32_t>(detail::narrow_f16(params.zero)) << 16;
    const float scale = detail::widen_f16(static_cast<std::uint16_t>(stored & 0xffffu));
    const float zero = detail::widen_f16(static_cast<std::uint16_t>(stored >> 16));
    const float inverse = scale == scale ? __fdiv_rn(1.f, scale) : 0.f;
    std::uint32_t word = 0;
#pragma unroll
    for (std::uint32_t n = 0; n < kCodesPerWord; ++n) word |= code_of(x[n], zero, inverse) << (4 * n);
    if (lane < words) reinterpret_cast<std::uint32_t*>(task.out)[row * words + lane] = word;
    if (lane == 0) reinterpret_cast<std::uint32_t*>(task.out + layout.params_offset())[row] = stored;
  }
}

}  // namespace

void launch_quantize(const TaskArray<QuantizeTask>& tasks, const PageLayout& layout, cudaStream_t stream) {
  if (tasks.count == 0) return;
  const Int4Layout copy(layout);
  if (layout.dtype == DType::bf16) {
    quantize_kernel<DType::bf16><<<tasks.count, kThreads, 0, stream>>>(tasks, copy);
  } else {
    quantize_kernel<DType::f16><<<tasks.count, kThreads, 0, stream>>>(tasks, copy);
  }
  check(cudaGetLastError(), "launch the quantize kernel");
}

void load_quantize_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, quantize_kernel<DType::f16>), "load the quantize kernel for f16 pages");
  check(cudaFuncGetAttributes(&attributes, quantize_kernel<DType::bf16>), "load the quantize kernel for bf16 pages");
}

}  // namespace sluice::gpu
