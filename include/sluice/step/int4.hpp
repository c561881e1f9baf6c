#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/step/page.hpp"

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

/// Bits of a channel of a copy, unless a policy wants fewer.
inline constexpr std::uint32_t kCodeBits = 4;
/// As few as there are copies of.
inline constexpr std::uint32_t kFewCodeBits = 3;

/// A copy of a page's K rows in codes of 4 bits, by which attention weights are estimated (Twilight, arXiv 2502.02770),
/// or of 3. What is copied of a key k is H(k - m), [head_dim] float32: every token has a scale and a zero of its own,
/// and channel c of H(k - m) stands for code * scale + zero. A query's estimate is score_scale * (H q . (code * scale +
/// zero) + q . m).
///
/// m, the *mean key*, is that of the sequence's first page, per layer and KV head: the sum of its K rows, as they lie
/// in the far page, in their order, float32, times 1 / page_tokens. It is 0 until the sequence has a token behind that
/// page, and elements that are not finite numbers count as 0. So it follows from the first page alone: sequences that
/// share pages share m, and one that is forked, parked or imported finds it again. Keys of some models have a large
/// constant part, beside which one step for all channels would leave nothing; q . m, the same for all tokens, takes it
/// out of the codes without a change to the estimate (SmoothQuant, arXiv 2211.10438, moves such parts likewise).
///
/// H, the orthonormal Hadamard rotation of every rotation_block of channels, spreads what single channels have
/// (QuaRot, arXiv 2404.00456): butterflies (a + b, a - b) of channels 1, 2, 4 ... apart in turn, then a product with
/// rotation_scale; float32, each rounded by itself.
///
/// First the codes of all tokens, row_bytes() each, then [page_tokens, 2] f16: scale, zero. Eight codes make a *unit*,
/// of which a row has head_dim / 8: unit w holds the channels w, w + units, w + 2 * units ...
///
/// Of 4 bits, a token's units are little-endian words of 32 bits, one behind the other, with the first code in the
/// lowest bits. So a vector of words, shifted and masked, is a vector of neighbouring channels, and every fourth bit of
/// each half word lines up with the 16-bit elements of a matrix fragment.
///
/// Of 3 bits, a unit is three bytes, a, b and c: code 0 is bits 0 to 2 of a and code 1 bits 3 to 5, codes 2 and 3 those
/// of b; code 4 is bits 0 to 2 of c and code 5 bits 4 to 6; code 6 has its low bits in bits 6 and 7 of a and its high
/// one in bit 3 of c, code 7 in b and in bit 7 of c. Eight tokens, an *octet*, lie together: first a and b of each unit
/// in turn, [8, units, 2] bytes, then c, [8, units]. So what a lane of a matrix fragment reads of a row is 12 bytes, of
/// head_dim 128, in two pieces that are aligned to their size, and the rows that a warp reads are neighbours; six of
/// eight codes are bytes of a fragment once a word is shifted and masked. page_tokens is a multiple of 8.
///
/// scale and zero are rounded to f16 first and the codes are the nearest to those. They saturate where f16 does; scale
/// is at least the smallest f16. A row of which an element of H(k - m) is NaN, as all are where one of k is, has NaN
/// for both. Of 4 bits codes 0 and 15 stand for the row's least and largest element, so that what is decoded is within
/// scale / 2 of H(k - m), but for the rounding of these two. Of 3 bits codes 0 and 7 enclose the middle 13/16 of that
/// range, and what lies beyond is off by at most 3/32 of it: elements are about normal, and eight levels tell more
/// where most of them are. The mean squared error is 0.86 times that of the whole range with normal elements and
/// head_dim 64, 0.76 with 128, 0.71 with 256; 0.86 with keys of SmolLM2-135M and of Qwen2.5-0.5B, where 2.2 standard
/// deviations on either side of a row's mean leave 0.93. One share for all sizes: the best ones, 0.85 to 0.75, leave 4%
/// less at most.
struct CodeLayout {
  std::uint32_t page_tokens = 16;
  std::uint32_t head_dim = 0;
  std::uint32_t bits = kCodeBits;  ///< or kFewCodeBits

  constexpr CodeLayout() = default;
  constexpr explicit CodeLayout(const PageLayout& layout, std::uint32_t code_bits = kCodeBits) noexcept
      : page_tokens(layout.page_tokens), head_dim(layout.head_dim), bits(code_bits) {}

  static constexpr std::uint32_t kOctet = 8;  ///< tokens whose codes of 3 bits lie together
  static constexpr float kLargest = 65504.f;  ///< f16
  static constexpr float kSmallest = 0x1p-24f;
  static constexpr std::uint32_t kParamBytes = 4;  ///< of a token's scale and zero
  /// Of what a row's elements range over, how much lies below code 0, and above code 7, of 3 bits.
  static constexpr float kBeyond = 3.f / 32.f;

  [[nodiscard]] constexpr bool few() const noexcept { return bits == kFewCodeBits; }
  /// The largest code.
  [[nodiscard]] constexpr std::uint32_t levels() const noexcept { return few() ? 7 : 15; }
  /// Steps of scale that a row's elements range over.
  [[nodiscard]] constexpr float steps() const noexcept { return few() ? 7.f / (1.f - 2 * kBeyond) : 15.f; }
  /// Of a row, of eight codes each.
  [[nodiscard]] constexpr std::uint32_t units() const noexcept { return head_dim / 8; }
  [[nodiscard]] constexpr std::uint64_t row_bytes() const noexcept { return std::uint64_t{head_dim} * bits / 8; }
  [[nodiscard]] constexpr std::uint64_t params_offset() const noexcept { return row_bytes() * page_tokens; }
  [[nodiscard]] constexpr std::uint64_t page_bytes() const noexcept {
    return params_offset() + std::uint64_t{kParamBytes} * page_tokens;
  }
  /// Where a row's words lie, of 3 bits bytes a and b of its units.
  [[nodiscard]] constexpr std::uint64_t codes_offset(std::uint32_t row) const noexcept {
    if (!few()) return row * row_bytes();
    return row / kOctet * (kOctet * row_bytes()) + row % kOctet * std::uint64_t{2} * units();
  }
  /// Of 3 bits, where bytes c lie.
  [[nodiscard]] constexpr std::uint64_t thirds_offset(std::uint32_t row) const noexcept {
    return row / kOctet * (kOctet * row_bytes()) + std::uint64_t{kOctet} * 2 * units() +
           row % kOctet * std::uint64_t{units()};
  }
  friend constexpr bool operator==(const CodeLayout&, const CodeLayout&) = default;
};

}  // namespace sluice
