#pragma once

#include "gpu/kernels/attend/attend.cuh"

/// Rows of K and V in shared memory, where decode attention reads them.
namespace sluice::gpu::detail {

/// A warp's slots of 16 rows. Which 16-byte chunk of a row lies where depends on the row, so that lanes read chunks of
/// K and V as the products need them without meeting in a bank.
template <int kDim>
struct RowRing {
  static constexpr std::uint32_t kChunks = kDim / 8;
  static constexpr std::uint32_t kPitch = (kChunks + 7) / 8 * 128;  ///< bytes
  static constexpr std::uint32_t kSlotBytes = 16 * kPitch;

  std::uint32_t base;  ///< address in shared memory

  /// Rows 2 i and 2 i + 1 differ in bit 2, for K; even rows, and odd ones, differ in bits 1 and 2, for V.
  [[nodiscard]] __device__ static std::uint32_t place(std::uint32_t row, std::uint32_t chunk) {
    return row * kPitch + (chunk ^ (row / 2 % 4 * 2) ^ (row % 2 * 4)) * 16;
  }

  /// Starts filling a slot with a unit's rows, counted from `from`; zeros for those that are none.
  __device__ void fill(std::uint32_t slot, const std::byte* from, std::uint32_t row) const {
#pragma unroll
    for (std::uint32_t k = 0; k < 16 * kChunks / 32; ++k) {
      const std::uint32_t i = 32 * k + threadIdx.x % 32;
      const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(i / kChunks));
      copy_async_once(base + slot * kSlotBytes + place(i / kChunks, i % kChunks),
                      from + std::uint64_t{mine} * RowShape<kDim>::kRowBytes + i % kChunks * 16, mine != kNoRow);
    }
  }

  /// As load_keys gives them.
  __device__ void read_keys(std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4], std::uint32_t slot) const {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (std::uint32_t j = 0; j < RowShape<kDim>::kKeyPieces; ++j)
        load_shared4(keys[half][j], base + slot * kSlotBytes + place(g + 8 * half, 4 * j + t));
    }
  }

  /// As load_values gives them.
  __device__ void read_values(std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4], std::uint32_t slot) const {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t n = 0; n < 4; ++n) {
      const std::uint32_t row = 2 * t + n % 2 + n / 2 * 8;
      const std::uint32_t at = base + slot * kSlotBytes;
#pragma unroll
      for (std::uint32_t c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
        if (RowShape<kDim>::whole(static_cast<int>(c))) {
          load_shared4(values[n][c], at + place(row, 8 * c + g));
        } else {
          load_shared2(values[n][c], at + place(row, 8 * c + g / 2) + g % 2 * 8);
        }
      }
    }
  }
};

}  // namespace sluice::gpu::detail
