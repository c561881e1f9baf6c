#include "sluice/units.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/cuda/kernels_internal.hpp"

// A decode step reads every weight once, so this kernel is a stream: one warp per weight row, 16 bytes per lane and
// load, several loads in flight per lane. The activations, a few KiB that all warps share, come from the caches.
namespace sluice::tools::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kWarps = 8;  ///< per block
/// Values per 16-byte chunk.
constexpr unsigned kChunk = 8;
/// Loads in flight per lane: at 1,024 threads per multiprocessor, 64 to 128 KiB.
template <unsigned kRows>
constexpr unsigned kDepth = kRows == 1 ? 8 : 4;

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Even and odd elements have sums of their own: half the chain of dependent additions.
__device__ void accumulate(float2& sum, uint4 w, uint4 x) {
  sum.x = fmaf(low(w.x), low(x.x), sum.x);
  sum.y = fmaf(high(w.x), high(x.x), sum.y);
  sum.x = fmaf(low(w.y), low(x.y), sum.x);
  sum.y = fmaf(high(w.y), high(x.y), sum.y);
  sum.x = fmaf(low(w.z), low(x.z), sum.x);
  sum.y = fmaf(high(w.z), high(x.z), sum.y);
  sum.x = fmaf(low(w.w), low(x.w), sum.x);
  sum.y = fmaf(high(w.w), high(x.w), sum.y);
}

__device__ float warp_sum(float value) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <unsigned kRows, bool kAdd>
__global__ void __launch_bounds__(kWarp* kWarps) matvec_kernel(ProductArgs args) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned out = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (out >= args.outs) return;  // whole warps leave
  const unsigned chunks = args.inner / kChunk;
  const auto* w = reinterpret_cast<const uint4*>(args.w) + static_cast<std::uint64_t>(out) * chunks;
  const auto* x = reinterpret_cast<const uint4*>(args.x);

  float2 sums[kRows] = {};
  for (unsigned base = lane; base < chunks; base += kWarp * kDepth<kRows>) {
    uint4 loaded[kDepth<kRows>];
#pragma unroll
    for (unsigned d = 0; d < kDepth<kRows>; ++d) {
      const unsigned chunk = base + d * kWarp;
      if (chunk < chunks) loaded[d] = __ldcs(w + chunk);  // read once: does not displace the activations
    }
#pragma unroll
    for (unsigned d = 0; d < kDepth<kRows>; ++d) {
      const unsigned chunk = base + d * kWarp;
      if (chunk >= chunks) continue;
#pragma unroll
      for (unsigned row = 0; row < kRows; ++row) accumulate(sums[row], loaded[d], __ldg(x + row * chunks + chunk));
    }
  }
#pragma unroll
  for (unsigned row = 0; row < kRows; ++row) {
    const float sum = warp_sum(sums[row].x + sums[row].y);
    float& y = args.y[static_cast<std::uint64_t>(row) * args.outs + out];
    if (lane == 0) y = kAdd ? y + sum : sum;
  }
}

using Kernel = void (*)(ProductArgs);
constexpr Kernel kKernels[kVectorRows][2] = {{matvec_kernel<1, false>, matvec_kernel<1, true>},
                                             {matvec_kernel<2, false>, matvec_kernel<2, true>},
                                             {matvec_kernel<3, false>, matvec_kernel<3, true>},
                                             {matvec_kernel<4, false>, matvec_kernel<4, true>}};

}  // namespace

void matvec(const ProductArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.rows > kVectorRows || args.inner % kChunk != 0) {
    throw Error(Errc::invalid_argument, "matvec of " + std::to_string(args.rows) + " rows of " +
                                            std::to_string(args.inner) + "; it takes 1 to " +
                                            std::to_string(kVectorRows) + " rows of a multiple of 8");
  }
  const auto blocks = static_cast<unsigned>(div_up(args.outs, kWarps));
  kKernels[args.rows - 1][args.add ? 1 : 0]<<<blocks, kWarp * kWarps, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the matrix-vector kernel");
}

void load_matvec() {
  for (const auto& of_rows : kKernels) {
    for (const Kernel kernel : of_rows) load(kernel);
  }
}

}  // namespace sluice::tools::cuda
