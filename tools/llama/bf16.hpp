#pragma once

#include <bit>
#include <cstdint>

namespace sluice::tools {

/// The nearest bf16, ties to even. NaN stays NaN.
[[nodiscard]] constexpr std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

[[nodiscard]] constexpr float from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

}  // namespace sluice::tools
