#pragma once

#include <bit>
#include <cstdint>

namespace sluice::cpu {

/// Scalar conversions between float32 and the two 16-bit formats, for tails and for the generic kernels.
/// Narrowing rounds to nearest even; NaN stays NaN (made quiet), what is too large becomes infinite.
/// Not for the translation units of one instruction set: these functions have external linkage.

[[nodiscard]] constexpr float bf16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

[[nodiscard]] constexpr std::uint16_t float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[nodiscard]] constexpr float f16_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x0040'0000u : 0u;
    return std::bit_cast<float>(sign | 0x7f80'0000u | quiet | (magnitude << 13));
  }
  // Read as a float32, the bits are the value times 2^-112, subnormals included.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1.0p112f));
}

[[nodiscard]] constexpr std::uint16_t float_to_f16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fff'ffffu;
  std::uint32_t half = 0x7c00u;
  if (magnitude > 0x7f80'0000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude < 0x3880'0000u) {
    // Subnormal in float16, whose unit is that of a float32 in [0.5, 1): the addition rounds.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(0.5f);
  } else if (magnitude < 0x4780'0000u) {
    half = (magnitude - 0x3800'0000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace sluice::cpu
