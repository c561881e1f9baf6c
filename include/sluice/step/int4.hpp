#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/page.hpp"

namespace sluice {

/// Channels of a head that are rotated together: the largest power of two that divides it.
[[nodiscard]] constexpr std::uint32_t rotation_block(std::uint32_t head_dim) noexcept {
  return head_dim & (~head_dim + 1);
}
/// 1 / sqrt of it, of 8 to 256.
[[nodiscard]] constexpr float rotation_scale(std::uint32_t block) noexcept {
  constexpr float kRoot = 0.707106781f;  // 1 / sqrt(2)
  float scale = 1.f;
  for (; block >= 4; block /= 4) scale /= 2.f;
  return block == 2 ? scale * kRoot : scale;
}

/// A 4-bit copy of a page's K rows, by which attention weights are estimated (Twilight, arXiv 2502.02770). What is
/// copied of a key k is H(k - m), [head_dim] float32: every token has a scale and a zero of its own, and channel c of
/// H(k - m) stands for code * scale + zero. A query's estimate is score_scale * (H q . (code * scale + zero) + q . m).
///
/// m, the *mean key*, is that of the sequence's first page, per layer and KV head: the sum of its K rows, as they lie in
/// the far page, in their order, float32, times 1 / page_tokens. It is 0 until the sequence has a token behind that
/// page, and elements that are not finite numbers count as 0. So it follows from the first page alone: sequences that
/// share pages share m, and one that is forked, parked or imported finds it again. Keys of some models have a large
/// constant part, beside which one step for all channels would leave nothing; q . m, the same for all tokens, takes it
/// out of the codes without a change to the estimate (SmoothQuant, arXiv 2211.10438, moves such parts likewise).
///
/// H, the orthonormal Hadamard rotation of every rotation_block of channels, spreads what single channels have
/// (QuaRot, arXiv 2404.00456): butterflies (a + b, a - b) of channels 1, 2, 4 ... apart in turn, then a product with
/// rotation_scale; float32, each rounded by itself.
///
/// First the codes of all tokens, head_dim / 2 bytes each, then [page_tokens, 2] f16: scale, zero. A token's codes are
/// head_dim / 8 little-endian words of 32 bits; word w holds the channels w, w + words, w + 2 * words ..., lowest bits
/// first. So a vector of words, shifted and masked, is a vector of neighbouring channels, and every fourth bit of each
/// half word lines up with the 16-bit elements of a matrix fragment.
///
/// scale and zero are rounded to f16 first and the codes are the nearest to those, so that what is decoded is within
/// scale / 2 of H(k - m), but for the rounding of its smallest and largest element. They saturate where f16 does; scale
/// is at least the smallest f16. A row of which an element of H(k - m) is NaN, as all are where one of k is, has NaN for
/// both.
struct Int4Layout {
  std::uint32_t page_tokens = 16;
  std::uint32_t head_dim = 0;

  constexpr Int4Layout() = default;
  constexpr explicit Int4Layout(const PageLayout& layout) noexcept
      : page_tokens(layout.page_tokens), head_dim(layout.head_dim) {}

  static constexpr std::uint32_t kLevels = 15;  ///< the largest code
  static constexpr float kLargest = 65504.f;    ///< f16
  static constexpr float kSmallest = 0x1p-24f;
  static constexpr std::uint32_t kParamBytes = 4;  ///< of a token's scale and zero

  [[nodiscard]] constexpr std::uint32_t words() const noexcept { return head_dim / 8; }
  [[nodiscard]] constexpr std::uint64_t row_bytes() const noexcept { return head_dim / 2; }
  [[nodiscard]] constexpr std::uint64_t params_offset() const noexcept { return row_bytes() * page_tokens; }
  [[nodiscard]] constexpr std::uint64_t page_bytes() const noexcept {
    return params_offset() + std::uint64_t{kParamBytes} * page_tokens;
  }
  /// Where channel c lies in a token's codes.
  [[nodiscard]] constexpr std::uint32_t word_of(std::uint32_t channel) const noexcept { return channel % words(); }
  [[nodiscard]] constexpr std::uint32_t shift_of(std::uint32_t channel) const noexcept { return channel / words() * 4; }
  friend constexpr bool operator==(const Int4Layout&, const Int4Layout&) = default;
};

}  // namespace sluice
