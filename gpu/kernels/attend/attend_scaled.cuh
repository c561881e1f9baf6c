#pragma once

#include "gpu/kernels/attend/attend_input.cuh"
#include "gpu/kernels/e4m3.cuh"

/// Rows with scales in decode attention. Codes come as they are, half the bytes of what the lane's registers have room
/// for, and become bf16 when they are used. Scales are powers of two: those of K multiply scores, those of V weights,
/// which is as exact and takes one product for each row instead of one for each element.
namespace sluice::gpu::detail {

/// Of the rows g and g + 8 of a unit: of K, of V. Empty where rows have none.
template <bool kHas>
struct UnitScales {
  float2 of[2];
};
template <>
struct UnitScales<false> {};

/// Where the page of a row lies that is counted in rows from `base`, K and V rows of pages one after the other, and
/// which of its rows it is.
template <int kDim>
struct ScaledRow {
  const std::byte* page;
  std::uint32_t row;
  std::uint32_t page_tokens;
  __device__ ScaledRow(const AttendSlice& slice, std::uint32_t entry) : page_tokens(slice.page_tokens) {
    const std::uint32_t index = entry >> __ffs(static_cast<int>(page_tokens));  // Pages have a power of two tokens.
    page = slice.base + std::uint64_t{index} * (page_tokens * (2 * kDim + 2 * sizeof(float)));
    row = entry & (page_tokens - 1);
  }
  [[nodiscard]] __device__ const std::byte* key() const { return page + row * kDim; }
  [[nodiscard]] __device__ const std::byte* value() const { return page + (page_tokens + row) * kDim; }
  [[nodiscard]] __device__ const std::byte* scales() const {
    return page + page_tokens * (2 * kDim) + row * (2 * sizeof(float));
  }
};

/// As load_keys: codes in the first half of each piece, and the scales of both rows.
template <int kDim, int kPieces>
__device__ void load_scaled_keys(std::uint32_t (&keys)[2][kPieces][4], UnitScales<true>& scales,
                                 const AttendSlice& slice, std::uint32_t row) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(g + 8 * half));
    const ScaledRow<kDim> at(slice, mine);
    const std::byte* const from = at.key() + t * 8;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load_half_once(keys[half][j], from + j * 32, mine != kNoRow);
    scales.of[half] = load_floats(at.scales(), mine != kNoRow);
  }
}

/// As load_values, likewise; `whole(c)` says whether piece c is one.
template <int kDim, int kPieces, class Whole>
__device__ void load_scaled_values(std::uint32_t (&values)[4][kPieces][4], const AttendSlice& slice, std::uint32_t row,
                                   const Whole& whole) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(2 * t + n % 2 + n / 2 * 8));
    const std::byte* const from = ScaledRow<kDim>(slice, mine).value() + g * 8;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      if (whole(c)) {
        load_half_once(values[n][c], from + c * 64, mine != kNoRow);
      } else {
        load_word_once(values[n][c], from + c * 64 - g * 4, mine != kNoRow);
      }
    }
  }
}

/// A lane's pieces become bf16, in place; of a piece that is half as long the second half is of no use.
template <int kRows, int kPieces>
__device__ void unfold(std::uint32_t (&pieces)[kRows][kPieces][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const uint2 low = bf16_of_codes(pieces[r][p][0]);
      const uint2 high = bf16_of_codes(pieces[r][p][1]);
      pieces[r][p][0] = low.x;
      pieces[r][p][1] = low.y;
      pieces[r][p][2] = high.x;
      pieces[r][p][3] = high.y;
    }
  }
}

}  // namespace sluice::gpu::detail
