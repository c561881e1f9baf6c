#include "tools/stages/merge.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/four.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"
#include "sluice/units.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

constexpr std::uint32_t kThreads = 128;
/// Partials whose loads are under way at once.
constexpr std::uint32_t kBatch = 4;

__device__ float4 load4(const float* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const float4*>(from);
  return make_float4(from[0], from[1], from[2], from[3]);
}

template <class T>
__device__ void store4_narrow(std::byte* out, std::uint64_t index, float4 value) {
  const uint2 bits = make_uint2(detail::pack<T>(value.x, value.y), detail::pack<T>(value.z, value.w));
  auto* to = reinterpret_cast<unsigned short*>(out) + index;
  if (reinterpret_cast<std::uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = bits;
  } else {
    to[0] = static_cast<unsigned short>(bits.x & 0xffffu);
    to[1] = static_cast<unsigned short>(bits.x >> 16);
    to[2] = static_cast<unsigned short>(bits.y & 0xffffu);
    to[3] = static_cast<unsigned short>(bits.y >> 16);
  }
}

__device__ void store4(std::byte* out, DType dtype, std::uint64_t index, float4 value) {
  if (dtype == DType::bf16) return store4_narrow<__nv_bfloat16>(out, index, value);
  if (dtype == DType::f16) return store4_narrow<__half>(out, index, value);
  detail::store4(reinterpret_cast<float*>(out) + index, value);
}

/// A running merge of four columns of one row: `out` and `mass` are relative to `top`.
struct Running {
  float top = kEmptyLse;
  float mass = 0.f;
  float4 out = {0.f, 0.f, 0.f, 0.f};

  __device__ void scale(float factor) {
    mass *= factor;
    out = make_float4(out.x * factor, out.y * factor, out.z * factor, out.w * factor);
  }
  /// An empty partial adds nothing, whatever its memory holds.
  __device__ void add(float lse, const float4& part) {
    if (lse == kEmptyLse) return;
    const float weight = expf(lse - top);
    mass += weight;
    detail::add_scaled(out, weight, part);
  }
};

/// One thread per four columns; blockIdx.y is the item.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs args) {
  const std::uint32_t column = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (column >= args.heads * args.head_dim) return;
  const std::uint32_t head = column / args.head_dim;
  const MergeItem item = args.items != nullptr ? args.items[blockIdx.y] : args.inline_items[blockIdx.y];
  const Partial* parts = (args.items != nullptr ? args.parts : args.inline_parts) + item.first_part;

  Running sum;
  for (std::uint32_t first = 0; first < item.parts; first += kBatch) {
    float lse[kBatch];
    float4 out[kBatch];
#pragma unroll
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      const bool there = first + i < item.parts;
      const Partial part = there ? parts[first + i] : Partial{};
      lse[i] = there ? part.lse[head] : kEmptyLse;
      out[i] = there ? load4(part.out + column) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float top = sum.top;
#pragma unroll
    for (std::uint32_t i = 0; i < kBatch; ++i) top = fmaxf(top, lse[i]);
    if (sum.top != kEmptyLse) sum.scale(expf(sum.top - top));
    sum.top = top;
#pragma unroll
    for (std::uint32_t i = 0; i < kBatch; ++i) sum.add(lse[i], out[i]);
  }
  const bool empty = !(sum.mass > 0.f);
  // Divided, not multiplied by an inverse: one partial alone comes out as it went in.
  const float mass = empty ? 1.f : sum.mass;
  store4(item.out, args.out_dtype, column,
         make_float4(sum.out.x / mass, sum.out.y / mass, sum.out.z / mass, sum.out.w / mass));
  if (item.lse != nullptr && column % args.head_dim == 0) {
    item.lse[head] = empty ? kEmptyLse : sum.top + logf(sum.mass);
  }
}

}  // namespace

void launch_merge(const MergeArgs& args, std::uint32_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(div_up(std::uint64_t{args.heads} * args.head_dim / 4, kThreads));
  merge_kernel<<<dim3(blocks, count), kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch merge");
}

void load_merge_kernels() { load_kernel(merge_kernel, "load the merge kernel"); }

}  // namespace sluice::tools
