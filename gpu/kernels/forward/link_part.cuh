#pragma once

#include <type_traits>

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/far_list.cuh"
#include "gpu/kernels/forward/near_part.cuh"

/// Far rows attended by the thread blocks that found them, where these are few: a way over the link is shorter than
/// the CPU's answer. All of them are asked for at once, and come while near rows are attended.
namespace sluice::gpu::forward {

/// A block's part of a KV head's far rows. Of its warps that attend, the last ones, which have the fewest near rows,
/// take 16 each: they ask for them, and wait for nobody else.
template <class T, int kDim>
class LinkPart {
  using Ring = detail::RowRing<kDim>;
  static constexpr std::uint32_t kUnit = 16;
  static constexpr std::uint32_t kUnits = kMostLinkRows / kUnit;
  static_assert(kMostLinkRows % kUnit == 0 && kUnits <= kAttendWarps);

 public:
  struct Shared {
    alignas(16) std::byte slots[2 * kUnits][Ring::kSlotBytes];  ///< keys of a unit, then its values, see RowRing
    std::uint32_t scales[kMostLinkRows][2];                     ///< of key and value, float32, if rows have some
    LinkRows far;
  };

  __device__ LinkPart(const ForwardMemory& m, const Work& work, Shared& s) : m_(m), work_(work), s_(s) {}

  /// Asks for the rows. Warps below kAsker, behind a barrier.
  __device__ void fill() const {
    if (kUnit * unit() >= s_.far.count) return;
    const std::uint32_t row = has(lane() % kUnit) ? s_.far.rows[kUnit * unit() + lane() % kUnit] : 0;
    if (scaled()) {
      fill_codes(row);
    } else {
      const std::uint32_t entry = has(lane() % kUnit) ? m_.far_entry(row) : detail::kNoRow;
      const std::byte* const keys = m_.far_plane(work_.plane);
      ring().fill(slot(), keys, entry);
      ring().fill(slot() + 1, keys + m_.far_layout.half_bytes(), entry);
    }
    detail::commit_copies();
  }

  /// Adds them to what this warp has attended near, once they are there. Likewise.
  __device__ void attend(NearPart<T, kDim>& near) const {
    if (kUnit * unit() >= s_.far.count) return;
    detail::wait_copies<0>();
    __syncwarp();
    if (scaled()) unfold();
    near.attend(ring(), slot(), members(lane() % kUnit));
  }

 private:
  static constexpr std::uint32_t kRowChunks = kDim / 16;  ///< 16 codes each, of a row with a scale

  [[nodiscard]] __device__ static std::uint32_t lane() { return threadIdx.x % kWarp; }
  [[nodiscard]] __device__ static std::uint32_t unit() { return kAttendWarps - 1 - threadIdx.x / kWarp; }
  [[nodiscard]] __device__ static std::uint32_t slot() { return 2 * unit(); }
  [[nodiscard]] __device__ Ring ring() const { return {detail::shared_address(s_.slots)}; }
  /// Whether rows have scales: near ones are bf16 then.
  [[nodiscard]] __device__ bool scaled() const { return std::is_same_v<T, __nv_bfloat16> && m_.far_layout.scaled(); }
  /// Of row `i` of the unit, as UnitRows has them.
  [[nodiscard]] __device__ std::uint32_t members(std::uint32_t i) const {
    if (!work_.row.draws.any()) return has(i) ? kAll : 0;
    return has(i) ? __float_as_uint(s_.far.corrections[kUnit * unit() + i]) : detail::kNoCorrection;
  }
  /// Whether there is a row `i` of the unit.
  [[nodiscard]] __device__ bool has(std::uint32_t i) const { return kUnit * unit() + i < s_.far.count; }

  /// Codes of rows, of which lane i has the i-th, one behind the other in the first half of each slot, and their
  /// scales.
  __device__ void fill_codes(std::uint32_t row) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kUnit * kRowChunks / kWarp; ++k) {
      const std::uint32_t i = kWarp * k + lane();
      const std::uint32_t mine = __shfl_sync(kAll, row, static_cast<int>(i / kRowChunks));
      const std::byte* const from = m_.far_key(work_.plane, mine) + i % kRowChunks * 16;
      const std::uint32_t to = ring().base + slot() * Ring::kSlotBytes + i * 16;
      detail::copy_async_once(to, from, has(i / kRowChunks));
      detail::copy_async_once(to + Ring::kSlotBytes, from + m_.far_layout.half_bytes(), has(i / kRowChunks));
    }
    const std::uint32_t mine = __shfl_sync(kAll, row, static_cast<int>(lane() / 2));
    if (!has(lane() / 2)) return;
    const auto* const scales = reinterpret_cast<const std::uint32_t*>(m_.far_scale_bytes(work_.plane, mine));
    detail::copy_word_async(&s_.scales[kUnit * unit() + lane() / 2][lane() % 2], scales + lane() % 2);
  }

  /// Codes of keys and of values become what lies near of such rows, where other rows lie.
  __device__ void unfold() const {
    constexpr std::uint32_t kEach = kUnit * kRowChunks / kWarp;
#pragma unroll 1
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t at = (slot() + half) * Ring::kSlotBytes;
      std::uint32_t codes[kEach][4];
#pragma unroll
      for (std::uint32_t k = 0; k < kEach; ++k)
        detail::load_shared4(codes[k], ring().base + at + (kWarp * k + lane()) * 16);
      __syncwarp();  // All have read what some are about to write to.
#pragma unroll
      for (std::uint32_t k = 0; k < kEach; ++k) {
        const std::uint32_t row = (kWarp * k + lane()) / kRowChunks;
        const std::uint32_t chunk = lane() % kRowChunks;
        // Of a row that is not there zeros, whatever its scale was.
        const float scale = has(row) ? __uint_as_float(s_.scales[kUnit * unit() + row][half]) : 0.f;
#pragma unroll
        for (std::uint32_t c = 0; c < 2; ++c) {
          const uint2 low = detail::bf16_of_codes(codes[k][2 * c], scale);
          const uint2 high = detail::bf16_of_codes(codes[k][2 * c + 1], scale);
          std::byte* const to = &s_.slots[0][0] + at + Ring::place(row, 2 * chunk + c);
          *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
        }
      }
    }
    __syncwarp();
  }

  const ForwardMemory& m_;
  const Work& work_;
  Shared& s_;
};

}  // namespace sluice::gpu::forward
