#pragma once

#include <bit>
#include <cstdint>

namespace sluice {

/// Unsigned image of a number in the order of the numbers; the two zeros are equal. -infinity is 0x007f'ffff, so that
/// there is room below for what is no number. Not for NaN.
[[nodiscard]] constexpr std::uint32_t order_key_of_number(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.f);  // -0 becomes +0.
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}

}  // namespace sluice
