#include <cuda_bf16.h>

#include "tools/llama/cuda/check.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/cuda/kernels_internal.hpp"
#include "tools/llama/random_weights.hpp"

namespace sluice::tools::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kStartThreads = 256;
constexpr unsigned kNormThreads = 512;
constexpr unsigned kSwigluThreads = 256;
constexpr unsigned kDrawThreads = 256;
constexpr unsigned kDrawBlocks = 4096;

__device__ Bf16 rounded(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
__device__ float widened(Bf16 bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

/// Four rounded values as one store.
__device__ uint2 rounded(float4 v) {
  const auto pair = [](float low, float high) {
    return static_cast<unsigned>(rounded(low)) | static_cast<unsigned>(rounded(high)) << 16;
  };
  return {pair(v.x, v.y), pair(v.z, v.w)};
}

/// One block per row.
__global__ void __launch_bounds__(kStartThreads) start_kernel(StartArgs args) {
  __shared__ int token;
  __shared__ std::uint32_t position;
  const std::uint64_t row = blockIdx.x;
  if (threadIdx.x == 0) {  // once: it may come over the link
    const PlacedToken placed = args.tokens[row];
    token = placed.token;
    position = placed.position;
  }
  __syncthreads();
  const Bf16* embedding = args.embeddings + static_cast<std::uint64_t>(token) * args.hidden;
  float* residual = args.residual + row * args.hidden;
  for (unsigned i = threadIdx.x; i < args.hidden; i += kStartThreads) residual[i] = widened(embedding[i]);
  float* rotation = args.rotation + row * 2 * args.half;
  for (unsigned i = threadIdx.x; i < args.half; i += kStartThreads) {
    // In double: a float angle is off by 1e-3 rad at position 32,768.
    double sine = 0;
    double cosine = 0;
    sincos(position * args.frequencies[i], &sine, &cosine);
    rotation[i] = static_cast<float>(cosine);
    rotation[args.half + i] = static_cast<float>(sine);
  }
}

/// The sum over a block of kNormThreads, in every thread.
__device__ float block_sum(float value) {
  __shared__ float partial[kNormThreads / kWarp];
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  float sum = 0;
  for (const float part : partial) sum += part;
  return sum;
}

/// One block per row.
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(NormArgs args) {
  const std::uint64_t row = blockIdx.x;
  const unsigned quads = args.hidden / 4;
  const auto* x = reinterpret_cast<const float4*>(args.x + row * args.hidden);
  const auto* gain = reinterpret_cast<const float4*>(args.gain);
  auto* out = reinterpret_cast<uint2*>(args.out + row * args.hidden);
  float sum = 0;
  for (unsigned i = threadIdx.x; i < quads; i += kNormThreads) {
    const float4 v = x[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float scale = 1.f / sqrtf(block_sum(sum) / static_cast<float>(args.hidden) + args.eps);
  for (unsigned i = threadIdx.x; i < quads; i += kNormThreads) {
    const float4 v = x[i];
    const float4 g = gain[i];
    out[i] = rounded(float4{v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w});
  }
}

/// Block (row, head), one thread per pair.
__global__ void rotate_kernel(RotateArgs args) {
  const std::uint64_t row = blockIdx.x;
  const unsigned head = blockIdx.y;
  const unsigned i = threadIdx.x;
  const std::uint64_t at = (row * args.heads + head) * 2 * args.half + i;
  float a = args.x[at];
  float b = args.x[at + args.half];
  if (head < args.rotated) {
    const float cosine = args.rotation[row * 2 * args.half + i];
    const float sine = args.rotation[row * 2 * args.half + args.half + i];
    const float turned = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = turned;
  }
  args.out[at] = rounded(a);
  args.out[at + args.half] = rounded(b);
}

__device__ float swiglu_of(float gate, float up) { return gate / (1.f + expf(-gate)) * up; }

/// Block (row, tile), four values per thread.
__global__ void __launch_bounds__(kSwigluThreads) swiglu_kernel(SwigluArgs args) {
  const std::uint64_t row = blockIdx.x;
  const unsigned quads = args.width / 4;
  const unsigned i = blockIdx.y * kSwigluThreads + threadIdx.x;
  if (i >= quads) return;
  const auto* gates = reinterpret_cast<const float4*>(args.gate_up + row * 2 * args.width);
  const float4 g = gates[i];
  const float4 u = gates[quads + i];
  auto* out = reinterpret_cast<uint2*>(args.out + row * args.width);
  out[i] = rounded(float4{swiglu_of(g.x, u.x), swiglu_of(g.y, u.y), swiglu_of(g.z, u.z), swiglu_of(g.w, u.w)});
}

__global__ void __launch_bounds__(kDrawThreads) draw_kernel(DrawArgs args) {
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * kDrawThreads;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * kDrawThreads + threadIdx.x; i < args.count;
       i += step) {
    args.out[i] = rounded(random_normal(args.key, i) * args.deviation);
  }
}

__global__ void raise_kernel(std::uint64_t* word, std::uint64_t value) {
  *static_cast<volatile std::uint64_t*>(word) = value;
}

unsigned blocks_for(std::uint64_t items, unsigned per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace

void start(const StartArgs& args, cudaStream_t stream) {
  start_kernel<<<args.rows, kStartThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the embedding kernel");
}

void rms_norm(const NormArgs& args, cudaStream_t stream) {
  rms_norm_kernel<<<args.rows, kNormThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the norm kernel");
}

void rotate(const RotateArgs& args, cudaStream_t stream) {
  rotate_kernel<<<dim3(args.rows, args.heads), args.half, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the rotation kernel");
}

void swiglu(const SwigluArgs& args, cudaStream_t stream) {
  swiglu_kernel<<<dim3(args.rows, blocks_for(args.width / 4, kSwigluThreads)), kSwigluThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the SwiGLU kernel");
}

void raise(std::uint64_t* word, std::uint64_t value, cudaStream_t stream) {
  raise_kernel<<<1, 1, 0, stream>>>(word, value);
  check(cudaGetLastError(), "launch the kernel that raises a word");
}

void draw(const DrawArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  const unsigned blocks =
      args.count < std::uint64_t{kDrawBlocks} * kDrawThreads ? blocks_for(args.count, kDrawThreads) : kDrawBlocks;
  draw_kernel<<<blocks, kDrawThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the kernel that draws weights");
}

void load_kernels() {
  load(start_kernel);
  load(rms_norm_kernel);
  load(rotate_kernel);
  load(swiglu_kernel);
  load(raise_kernel);
  load(draw_kernel);
  load_likeliest();
  load_matvec();
}

}  // namespace sluice::tools::cuda
