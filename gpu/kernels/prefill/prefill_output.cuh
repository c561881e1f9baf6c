#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/prefill.hpp"

/// What the prefill kernels do with a row whose keys are all attended: its part joins that of earlier windows.
namespace sluice::gpu::detail {

__device__ inline float load_number(const std::byte* data, DType dtype, std::uint64_t index) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(data)[index];
  if (dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(data)[index]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[index]);
}

__device__ inline void store_number(std::byte* data, DType dtype, std::uint64_t index, float value) {
  if (dtype == DType::f32) {
    reinterpret_cast<float*>(data)[index] = value;
  } else if (dtype == DType::f16) {
    reinterpret_cast<__half*>(data)[index] = __float2half_rn(value);
  } else {
    reinterpret_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  }
}

template <class Pair>
__device__ Pair make_pair(float x, float y) {
  if constexpr (std::is_same_v<Pair, float2>) {
    return make_float2(x, y);
  } else if constexpr (std::is_same_v<Pair, __half2>) {
    return __floats2half2_rn(x, y);
  } else {
    return __floats2bfloat162_rn(x, y);
  }
}

/// The first key that a query at `position` sees; `reach` as PrefillItem's.
__device__ inline std::uint32_t first_seen(std::uint32_t position, std::uint32_t reach) {
  return reach == 0 || position < reach ? 0 : position + 1 - reach;
}

/// Soft-caps products of queries and keys, so that what they become times `scale` is the score.
template <int kCount>
__device__ void cap_products(float (&products)[kCount], float scale, float softcap) {
  const float in = scale / softcap;
  const float out = softcap / scale;
#pragma unroll
  for (int i = 0; i < kCount; ++i) products[i] = out * tanh_fast(products[i] * in);
}

/// Whether every row of the outputs begins at a multiple of so many elements.
__device__ inline bool outputs_aligned(const PrefillItem& item, const PrefillShape& shape, std::uint32_t elements) {
  const std::uint64_t bytes = shape.out_dtype == DType::f32 ? 4 : 2;
  return (reinterpret_cast<std::uintptr_t>(item.out) % (elements * bytes) | shape.out_token_stride % elements |
          shape.out_head_stride % elements) == 0;
}

/// A row's share of what it summed up now, which normalises it, and of what earlier windows gave.
struct RowShares {
  float now = 0.f;
  float earlier = 0.f;
  float lse = -INFINITY;
};

/// `mass`: the sum of the row's weights, which are relative to 2^base. `earlier`: lse of the windows before.
__device__ inline RowShares share_row(float mass, float base, float earlier) {
  constexpr float kLn2 = 0.693147180559945309f;
  // A row that attended nothing has no mass; one that met a NaN has one that is NaN, and keeps it.
  const float lse = mass == 0.f ? -INFINITY : (base + log2f(mass)) * kLn2;
  const float inverse = mass == 0.f ? 0.f : 1.f / mass;
  if (earlier == -INFINITY) return {.now = inverse, .earlier = 0.f, .lse = lse};
  const float top = fmaxf(lse, earlier);
  const float a = expf(lse - top);
  const float b = expf(earlier - top);
  return {.now = a / (a + b) * inverse, .earlier = b / (a + b), .lse = top + logf(a + b)};
}

/// What one thread has of a row: columns 8 n + 2 t and + 1. The lanes t = 0..3 have the whole row.
template <int kDim>
using RowPart = float2[kDim / 8];

template <class Pair, int kDim>
__device__ void store_pairs(std::byte* row, const RowPart<kDim>& part) {
  auto* const to = reinterpret_cast<Pair*>(row) + threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) to[4 * n] = make_pair<Pair>(part[n].x, part[n].y);
}

/// Four words of each of a row's four lanes: lane t gets word t of all, in the lanes' order. By whole warps.
__device__ inline void transpose_words(std::uint32_t (&words)[4]) {
  const bool upper = (threadIdx.x & 2) != 0;
  const std::uint32_t a = __shfl_xor_sync(kAllLanes, upper ? words[0] : words[2], 2);
  const std::uint32_t b = __shfl_xor_sync(kAllLanes, upper ? words[1] : words[3], 2);
  const std::uint32_t pairs[4]{upper ? a : words[0], upper ? b : words[1], upper ? words[2] : a, upper ? words[3] : b};
  const bool odd = (threadIdx.x & 1) != 0;
  const std::uint32_t c = __shfl_xor_sync(kAllLanes, odd ? pairs[0] : pairs[1], 1);
  const std::uint32_t d = __shfl_xor_sync(kAllLanes, odd ? pairs[2] : pairs[3], 1);
  words[0] = odd ? c : pairs[0];
  words[1] = odd ? pairs[1] : c;
  words[2] = odd ? d : pairs[2];
  words[3] = odd ? pairs[3] : d;
}

/// 16 bytes at a time: every store of a warp fills whole sectors.
template <class Pair, int kDim>
__device__ void store_octets(std::byte* row, const RowPart<kDim>& part, bool there) {
  static_assert(sizeof(Pair) == 4 && kDim % 32 == 0);
  auto* const to = reinterpret_cast<uint4*>(row) + threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 4) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair pair = make_pair<Pair>(part[n + i].x, part[n + i].y);
      words[i] = reinterpret_cast<const std::uint32_t&>(pair);
    }
    transpose_words(words);
    if (there) to[n] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <int kDim>
__device__ void store_row(const PrefillItem& item, const PrefillShape& shape, std::uint64_t row,
                          const RowPart<kDim>& part, bool there) {
  if (shape.out_dtype != DType::f32 && outputs_aligned(item, shape, 8)) {
    shape.out_dtype == DType::f16 ? store_octets<__half2, kDim>(item.out + row * 2, part, there)
                                  : store_octets<__nv_bfloat162, kDim>(item.out + row * 2, part, there);
  } else if (!there) {
    return;
  } else if (shape.out_dtype == DType::f32 && outputs_aligned(item, shape, 2)) {
    store_pairs<float2, kDim>(item.out + row * 4, part);
  } else {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      store_number(item.out, shape.out_dtype, row + 8 * n + 2 * (threadIdx.x % 4), part[n].x);
      store_number(item.out, shape.out_dtype, row + 8 * n + 2 * (threadIdx.x % 4) + 1, part[n].y);
    }
  }
}

/// Where a row is written, if it is a row of the chunk.
struct RowPlace {
  std::uint32_t token = 0;
  std::uint32_t head = 0;
  bool there = false;
};

/// Finishes a row of which `part` is the weighted sum of values, in what becomes the result. By whole warps.
template <int kDim>
__device__ void write_row(const PrefillItem& item, const PrefillArgs& args, const RowPlace& place, float mass,
                          float base, RowPart<kDim>& part) {
  const std::uint32_t t = threadIdx.x % 4;
  const std::uint64_t row = std::uint64_t{place.token} * args.row_heads + place.head;
  const bool joins = place.there && !item.first_window;
  const RowShares shares = share_row(mass, base, joins ? item.lse[row] : -INFINITY);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) part[n] = make_float2(part[n].x * shares.now, part[n].y * shares.now);
  if (joins) {
    const float2* const before = reinterpret_cast<const float2*>(item.so_far + row * kDim) + t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      part[n].x += shares.earlier * before[4 * n].x;
      part[n].y += shares.earlier * before[4 * n].y;
    }
  }
  __syncwarp();  // The row's four lanes have read its lse.
  if (place.there && item.lse != nullptr && t == 0) item.lse[row] = shares.lse;
  if (item.last_window) {
    const std::uint64_t at = place.token * args.shape.out_token_stride + place.head * args.shape.out_head_stride;
    store_row<kDim>(item, args.shape, at, part, place.there);
  } else if (place.there) {
    store_pairs<float2, kDim>(reinterpret_cast<std::byte*>(item.so_far + row * kDim), part);
  }
}

}  // namespace sluice::gpu::detail
