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

/// Whether every row of the outputs can be written by pairs.
__device__ inline bool pairs_aligned(const PrefillItem& item, const PrefillShape& shape) {
  const std::uint64_t bytes = shape.out_dtype == DType::f32 ? 4 : 2;
  return (reinterpret_cast<std::uintptr_t>(item.out) % (2 * bytes) | shape.out_token_stride % 2 |
          shape.out_head_stride % 2) == 0;
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

template <int kDim>
__device__ void store_row(const PrefillItem& item, const PrefillShape& shape, std::uint64_t row,
                          const RowPart<kDim>& part) {
  if (!pairs_aligned(item, shape)) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      store_number(item.out, shape.out_dtype, row + 8 * n + 2 * (threadIdx.x % 4), part[n].x);
      store_number(item.out, shape.out_dtype, row + 8 * n + 2 * (threadIdx.x % 4) + 1, part[n].y);
    }
  } else if (shape.out_dtype == DType::f32) {
    store_pairs<float2, kDim>(item.out + row * 4, part);
  } else if (shape.out_dtype == DType::f16) {
    store_pairs<__half2, kDim>(item.out + row * 2, part);
  } else {
    store_pairs<__nv_bfloat162, kDim>(item.out + row * 2, part);
  }
}

/// Finishes a row of which `part` is the weighted sum of values, in what becomes the result.
template <int kDim>
__device__ void write_row(const PrefillItem& item, const PrefillArgs& args, std::uint32_t token, std::uint32_t head,
                          float mass, float base, RowPart<kDim>& part) {
  const std::uint32_t t = threadIdx.x % 4;
  const std::uint64_t row = std::uint64_t{token} * args.row_heads + head;
  const RowShares shares = share_row(mass, base, item.first_window ? -INFINITY : item.lse[row]);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) part[n] = make_float2(part[n].x * shares.now, part[n].y * shares.now);
  if (!item.first_window) {
    const float2* const before = reinterpret_cast<const float2*>(item.so_far + row * kDim) + t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      part[n].x += shares.earlier * before[4 * n].x;
      part[n].y += shares.earlier * before[4 * n].y;
    }
  }
  __syncwarp(0xfu << (threadIdx.x % 32 - t));  // The row's four lanes have read its lse.
  if (item.lse != nullptr && t == 0) item.lse[row] = shares.lse;
  if (item.last_window) {
    store_row<kDim>(item, args.shape, token * args.shape.out_token_stride + head * args.shape.out_head_stride, part);
  } else {
    store_pairs<float2, kDim>(reinterpret_cast<std::byte*>(item.so_far + row * kDim), part);
  }
}

}  // namespace sluice::gpu::detail
