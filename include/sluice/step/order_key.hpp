#pragma once

#include <bit>
#include <cstdint>

namespace sluice {
namespace detail {

template <bool kWeighed>
[[nodiscard]] constexpr std::uint32_t order_key(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.f);  // -0 becomes +0.
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u || (kWeighed && bits == 0xff80'0000u)) return 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}

}  // namespace detail

/// Unsigned image of a value in the order of the numbers, 0 for NaN; the two zeros are equal. -infinity is 0x007f'ffff.
[[nodiscard]] constexpr std::uint32_t order_key(float value) noexcept { return detail::order_key<false>(value); }

/// The same for what is weighed: 0 for -infinity, too, which has no weight.
[[nodiscard]] constexpr std::uint32_t weighed_key(float value) noexcept { return detail::order_key<true>(value); }

}  // namespace sluice
