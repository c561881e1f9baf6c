#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/page.hpp"

namespace sluice {

/// A 4-bit copy of a page's K rows, by which attention weights are estimated (Twilight, arXiv 2502.02770): every
/// token has a scale and a zero of its own, and channel c of it stands for code * scale + zero.
///
/// First the codes of all tokens, head_dim / 2 bytes each, then [page_tokens, 2] f16: scale, zero. A token's codes are
/// head_dim / 8 little-endian words of 32 bits; word w holds the channels w, w + words, w + 2 * words ..., lowest bits
/// first. So a vector of words, shifted and masked, is a vector of neighbouring channels, and every fourth bit of each
/// half word lines up with the 16-bit elements of a matrix fragment.
///
/// scale and zero are rounded to f16 first and the codes are the nearest to those, so that what is decoded is within
/// scale / 2 of the key, but for the rounding of the row's smallest and largest element. They saturate where f16 does;
/// scale is at least the smallest f16, so that a constant key has one. A row with NaN has NaN for both.
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
