#pragma once

#include <cstdint>

namespace sluice {

/// Rows of 8-bit floats with a scale: what an element stands for is its code times the scale of its row.
///
/// Codes are OCP E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; subnormals down to 2^-9, the largest is
/// 448, there is no infinity, and 0x7f and 0xff are NaN. A scale is a power of two, so that the product is exact in
/// bf16, for which its limits are: the one that brings the row's largest magnitude into (224, 448]. Elements are
/// divided by it and rounded to the nearest code, of two to the even one. Magnitudes above kLargest * kMostScale, the
/// largest finite ones, saturate.
///
/// A row with an element that is not finite is NaN in all its elements: its scale is, and every code is kNaN.
/// The same on every device, bit by bit.
struct E4m3 {
  static constexpr float kLargest = 448.f;
  static constexpr float kLeastScale = 0x1p-124f;  ///< smallest code and all others are multiples of bf16's smallest
  static constexpr float kMostScale = 0x1p119f;    ///< the largest code is below bf16's largest
  static constexpr std::uint8_t kNaN = 0x7f;
};

}  // namespace sluice
