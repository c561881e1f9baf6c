#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "sluice/page_rules.hpp"
#include "sluice/step/page.hpp"

/// The digest of a page of keys, as the CPU makes it, bit by bit.
namespace sluice::gpu::detail {

/// Eight columns of a page's keys.
struct Columns {
  const std::byte* k;
  const float* scales;  ///< [rows, 2] of a type that has some; the first count
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

template <DType kType>
__device__ __forceinline__ void load_columns(const Columns& columns, std::uint32_t row, float (&out)[kUnit]) {
  const std::byte* const from = columns.k + row * columns.row_bytes;
  if constexpr (kScaled<kType>) {
    const uint2 codes = *reinterpret_cast<const uint2*>(from);
    const float scale = columns.scales[2 * row];
    float low[4], high[4];
    widen_codes(codes.x, scale, low);
    widen_codes(codes.y, scale, high);
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) out[i] = low[i], out[i + 4] = high[i];
  } else {
    load_unit<kType>(from, out);
  }
}

struct Box {
  float hi[kUnit];
  float lo[kUnit];
};

/// The comparisons keep the old value if the new one is NaN, as the CPU's do: NaN in the first row makes the column's
/// box NaN, NaN in a later row is ignored.
template <DType kType>
__device__ __forceinline__ Box box_of(const Columns& columns) {
  Box box;
  load_columns<kType>(columns, 0, box.hi);
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) box.lo[c] = box.hi[c];
#pragma unroll 8
  for (std::uint32_t r = 1; r < columns.rows; ++r) {
    float k[kUnit];
    load_columns<kType>(columns, r, k);
#pragma unroll
    for (std::uint32_t c = 0; c < kUnit; ++c) {
      box.hi[c] = k[c] > box.hi[c] ? k[c] : box.hi[c];
      box.lo[c] = k[c] < box.lo[c] ? k[c] : box.lo[c];
    }
  }
  return box;
}

/// Centre of the box +- mean distance from it (ArkVale, eq. 4), inside the box. Each operation rounds like the CPU's,
/// so that both sides store the same bits; the intrinsics are not contracted.
template <DType kType>
__device__ __forceinline__ void shrink_to_mean(const Columns& columns, Box& box) {
  float centre[kUnit];
  float distance[kUnit];
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) {
    centre[c] = __fmaf_rn(box.hi[c], 0.5f, __fmul_rn(box.lo[c], 0.5f));
    distance[c] = 0.f;
  }
#pragma unroll 8
  for (std::uint32_t r = 0; r < columns.rows; ++r) {
    float k[kUnit];
    load_columns<kType>(columns, r, k);
#pragma unroll
    for (std::uint32_t c = 0; c < kUnit; ++c) distance[c] = __fadd_rn(distance[c], fabsf(__fsub_rn(k[c], centre[c])));
  }
  const float share = __fdiv_rn(1.f, static_cast<float>(columns.rows));
#pragma unroll
  for (std::uint32_t c = 0; c < kUnit; ++c) {
    const float radius = __fmul_rn(distance[c], share);
    const float hi = __fadd_rn(centre[c], radius);
    const float lo = __fsub_rn(centre[c], radius);
    box.hi[c] = hi < box.hi[c] ? hi : box.hi[c];
    box.lo[c] = lo > box.lo[c] ? lo : box.lo[c];
  }
}

/// Lane `lane` of a warp: its eight columns, if there are as many. The digest of a type with scales is of bf16.
template <DType kType>
__device__ __forceinline__ void digest_page(const std::byte* page, std::byte* out, DigestKind kind,
                                            const PageLayout& layout, std::uint32_t lane) {
  if (lane >= layout.head_dim / kUnit) return;
  constexpr DType kMade = kNearType<kType>;
  const std::uint32_t row_bytes = layout.head_dim * kElementBytes<kType>;
  const Columns columns{.k = page + lane * kUnit * kElementBytes<kType>,
                        .scales = reinterpret_cast<const float*>(page + layout.scales_offset()),
                        .rows = layout.page_tokens,
                        .row_bytes = row_bytes};
  Box box = box_of<kType>(columns);
  if (kind == DigestKind::cuboid_mean) shrink_to_mean<kType>(columns, box);
  std::byte* const to = out + lane * kUnit * kElementBytes<kMade>;
  store_unit<kMade>(to, box.hi);
  store_unit<kMade>(to + layout.head_dim * kElementBytes<kMade>, box.lo);
}

}  // namespace sluice::gpu::detail
