#pragma once

#include <bit>
#include <cstdint>

namespace sluice::scheduler {

/// To the nearest, ties to even. NaN stays NaN.
[[nodiscard]] inline std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

[[nodiscard]] inline float from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

}  // namespace sluice::scheduler
