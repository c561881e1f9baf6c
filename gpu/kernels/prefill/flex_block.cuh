#pragma once

#include <cmath>
#include <type_traits>

#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/flex.hpp"

/// What the kernels of FlexPrefill that are no products have in common.
namespace sluice::gpu::detail {

/// Calls `use` with a function that loads element c of a query: its `token` is of the chunk. The element type is looked
/// at once, before the loads, so that many of these can be under way.
template <class Use>
__device__ void with_queries(const FlexItem& item, const PrefillShape& shape, std::uint32_t head, const Use& use) {
  const auto with_type = [&](auto dtype) {
    constexpr DType kType = decltype(dtype)::value;
    constexpr std::uint32_t kBytes = kType == DType::f32 ? 4 : 2;
    const std::byte* const from = item.q + head * shape.q_head_stride * kBytes;
    const std::uint64_t stride = shape.q_token_stride * kBytes;
    use([=](std::uint32_t token, std::uint32_t c) { return load_element<kType>(from + token * stride + c * kBytes); });
  };
  switch (shape.q_dtype) {
    case DType::f32: return with_type(std::integral_constant<DType, DType::f32>{});
    case DType::f16: return with_type(std::integral_constant<DType, DType::f16>{});
    case DType::bf16: return with_type(std::integral_constant<DType, DType::bf16>{});
    case DType::fp8_e4m3: break;  // No tensor has it.
  }
}

/// The sum over all lanes of a warp, the same bits in each.
__device__ inline float over_lanes(float sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}
__device__ inline std::uint32_t over_lanes(std::uint32_t sum) { return __reduce_add_sync(kAllLanes, sum); }

/// Sums and maxima over all threads of a block of kThreads, the same bits in all of them every time.
template <int kThreads>
class BlockReduce {
 public:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  /// Reductions take turns, so that one barrier each is enough: the next but one writes after the next one's.
  struct Memory {
    double warps[2][kWarps];
  };
  __device__ explicit BlockReduce(Memory& memory) : memory_(memory) {}

  template <class V>
  __device__ V sum(V value) {
    return reduce(value, V{0}, [](V a, V b) { return a + b; });
  }
  __device__ std::uint32_t sum(std::uint32_t value) { return sum(make_uint2(value, 0)).x; }
  __device__ uint2 sum(uint2 value) {
    uint2* const warps = reinterpret_cast<uint2*>(memory_.warps[turn_++ % 2]);
    value = make_uint2(__reduce_add_sync(kAllLanes, value.x), __reduce_add_sync(kAllLanes, value.y));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < kWarps ? warps[threadIdx.x % 32] : make_uint2(0, 0);
    return make_uint2(__reduce_add_sync(kAllLanes, value.x), __reduce_add_sync(kAllLanes, value.y));
  }
  __device__ float max(float value) {
    return reduce(value, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
  }

 private:
  template <class V, class Combine>
  __device__ V reduce(V value, V nothing, const Combine& combine) {
    V* const warps = reinterpret_cast<V*>(memory_.warps[turn_++ % 2]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < kWarps ? warps[threadIdx.x % 32] : nothing;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
    return value;
  }

  Memory& memory_;
  std::uint32_t turn_ = 0;
};

/// The largest number of kBits bits for which `holds`, which is true for 0 and false from some number on.
template <int kBits, class Holds>
__device__ std::uint32_t largest_that(const Holds& holds) {
  std::uint32_t found = 0;
  for (int bit = kBits - 1; bit >= 0; --bit) {
    const std::uint32_t next = found | 1u << bit;
    if (holds(next)) found = next;
  }
  return found;
}

/// Weights of the softmax of query . mean key over the first `blocks` key blocks, relative to the largest, into
/// weights[blocks]; their sum is returned. Scores that are not finite weigh nothing. Ends with a barrier.
template <int kThreads>
__device__ float pooled_attention(const FlexItem& item, const FlexArgs& args, const float* query, std::uint32_t blocks,
                                  float* weights, BlockReduce<kThreads>& reduce) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  float mine[4];
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) mine[i] = lane + 32 * i < args.head_dim ? query[lane + 32 * i] : 0.f;
#pragma unroll 8
  for (std::uint32_t block = warp; block < blocks; block += kThreads / 32) {
    const float* const key = item.mean_keys + std::uint64_t{block} * args.head_dim;
    float dot = 0.f;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) dot += lane + 32 * i < args.head_dim ? mine[i] * key[lane + 32 * i] : 0.f;
    dot = over_lanes(dot);
    if (lane == 0) weights[block] = fabsf(dot) < INFINITY ? dot * args.score_scale : -INFINITY;
  }
  __syncthreads();
  float top = -INFINITY;
  for (std::uint32_t i = threadIdx.x; i < blocks; i += kThreads) top = fmaxf(top, weights[i]);
  top = reduce.max(top);
  float sum = 0.f;
  for (std::uint32_t i = threadIdx.x; i < blocks; i += kThreads) {
    weights[i] = weights[i] == -INFINITY ? 0.f : expf(weights[i] - top);
    sum += weights[i];
  }
  sum = reduce.sum(sum);
  __syncthreads();
  return sum;
}

/// How many blocks of columns, and of offsets, a head may have, and a query block that chooses for itself.
struct FlexLimits {
  std::uint32_t least;
  std::uint32_t most;
};
__device__ __forceinline__ FlexLimits limits_of(const FlexPrefillSpec& spec, std::uint32_t blocks) {
  const auto in_blocks = [](std::uint32_t tokens) {
    return tokens / kPrefillBlock + (tokens % kPrefillBlock != 0 ? 1u : 0u);
  };
  FlexLimits limits;
  limits.least = max(1u, min(in_blocks(spec.min_budget), blocks));
  limits.most = spec.max_budget == 0 ? blocks : max(limits.least, min(in_blocks(spec.max_budget), blocks));
  return limits;
}

}  // namespace sluice::gpu::detail
