#include "sluice/units.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/cuda/kernels_internal.hpp"

// A logit and its token are one number, the largest of which is the likeliest token: thread blocks take the maximum of
// a part of the row each, and a warp that of the parts. In which order they do does not matter.
namespace sluice::tools::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kThreads = 256;
constexpr unsigned kDepth = 8;  ///< logits of a thread that are loaded at once

using Ranked = unsigned long long;
static_assert(sizeof(Ranked) == sizeof(std::uint64_t));
constexpr unsigned kSign = 0x8000'0000u;

/// 0 for NaN, below all others. Among equals, -0 and 0 included, that of the lower token is the larger one.
__device__ Ranked ranked(float logit, unsigned token) {
  if (isnan(logit)) return 0;
  const unsigned bits = logit == 0.f ? 0u : __float_as_uint(logit);
  const unsigned rises = (bits & kSign) != 0 ? ~bits : bits | kSign;
  return static_cast<Ranked>(rises) << 32 | ~token;
}

__device__ Likeliest of(Ranked best) {
  if (best == 0) return {};
  const auto rises = static_cast<unsigned>(best >> 32);
  return {.token = static_cast<std::int32_t>(~static_cast<unsigned>(best)),
          .logit = __uint_as_float((rises & kSign) != 0 ? rises & ~kSign : ~rises)};
}

__device__ Ranked warp_most(Ranked value) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

/// Block (row, part). Parts take turns: what is read at a time lies side by side.
__global__ void __launch_bounds__(kThreads) parts_kernel(LikeliestArgs args) {
  const std::uint64_t row = blockIdx.x;
  const float* logits = args.logits + row * args.width;
  const unsigned step = gridDim.y * kThreads;
  Ranked most = 0;
  for (unsigned base = blockIdx.y * kThreads + threadIdx.x; base < args.width; base += step * kDepth) {
    float loaded[kDepth];
#pragma unroll
    for (unsigned d = 0; d < kDepth; ++d) {
      const unsigned token = base + d * step;
      if (token < args.width) loaded[d] = logits[token];
    }
#pragma unroll
    for (unsigned d = 0; d < kDepth; ++d) {
      const unsigned token = base + d * step;
      if (token < args.width) most = max(most, ranked(loaded[d], token));
    }
  }
  __shared__ Ranked of_warps[kThreads / kWarp];
  most = warp_most(most);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const Ranked other : of_warps) most = max(most, other);
  args.parts[row * kLikeliestParts + blockIdx.y] = most;
}

/// One warp per row.
__global__ void __launch_bounds__(kWarp) likeliest_kernel(LikeliestArgs args, unsigned parts) {
  const std::uint64_t row = blockIdx.x;
  Ranked most = 0;
  for (unsigned part = threadIdx.x; part < parts; part += kWarp)
    most = max(most, static_cast<Ranked>(args.parts[row * kLikeliestParts + part]));
  most = warp_most(most);
  if (threadIdx.x == 0) args.out[row] = of(most);
}

}  // namespace

void likeliest(const LikeliestArgs& args, cudaStream_t stream) {
  const auto wanted = static_cast<unsigned>(div_up(args.width, kThreads * kDepth));
  const unsigned parts = wanted < kLikeliestParts ? wanted : kLikeliestParts;
  parts_kernel<<<dim3(args.rows, parts), kThreads, 0, stream>>>(args);
  likeliest_kernel<<<args.rows, kWarp, 0, stream>>>(args, parts);
  check(cudaGetLastError(), "launch the kernels that choose tokens");
}

void load_likeliest() {
  load(parts_kernel);
  load(likeliest_kernel);
}

}  // namespace sluice::tools::cuda
