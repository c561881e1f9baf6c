#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/prefill.hpp"

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

/// Two numbers at an even index of an array that is aligned to two of them.
__device__ inline void store_pair(std::byte* data, DType dtype, std::uint64_t index, float2 pair) {
  if (dtype == DType::f32) {
    *reinterpret_cast<float2*>(data + index * 4) = pair;
  } else if (dtype == DType::f16) {
    *reinterpret_cast<__half2*>(data + index * 2) = __float22half2_rn(pair);
  } else {
    *reinterpret_cast<__nv_bfloat162*>(data + index * 2) = __float22bfloat162_rn(pair);
  }
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

/// What one thread has of a row: columns 8 n + 2 t and + 1, as pair(n). The lanes t = 0..3 have the whole row.
template <int kDim, class Pair>
__device__ void write_row(const PrefillItem& item, const PrefillArgs& args, std::uint32_t token, std::uint32_t head,
                          float mass, float base, const Pair& pair) {
  const std::uint32_t t = threadIdx.x % 4;
  const std::uint64_t row = std::uint64_t{token} * args.group + head;
  const RowShares shares = share_row(mass, base, item.first_window ? -INFINITY : item.lse[row]);
  float2* const so_far = reinterpret_cast<float2*>(item.so_far + row * kDim);  // Looked at between windows only.
  const std::uint64_t at = token * args.shape.out_token_stride + head * args.shape.out_head_stride + 2 * t;
  const bool pairs = pairs_aligned(item, args.shape);
  __syncwarp(0xfu << (threadIdx.x % 32 - t));  // The row's four lanes have read its lse.
  if (item.lse != nullptr && t == 0) item.lse[row] = shares.lse;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    float2 value = pair(n);
    value.x *= shares.now;
    value.y *= shares.now;
    if (!item.first_window) {
      const float2 before = so_far[4 * n + t];
      value.x += shares.earlier * before.x;
      value.y += shares.earlier * before.y;
    }
    if (!item.last_window) {
      so_far[4 * n + t] = value;
    } else if (pairs) {
      store_pair(item.out, args.shape.out_dtype, at + 8 * n, value);
    } else {
      store_number(item.out, args.shape.out_dtype, at + 8 * n, value.x);
      store_number(item.out, args.shape.out_dtype, at + 8 * n + 1, value.y);
    }
  }
}

}  // namespace sluice::gpu::detail
