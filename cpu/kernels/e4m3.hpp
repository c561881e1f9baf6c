#pragma once

#include "cpu/kernels/rows.hpp"
#include "sluice/step/e4m3.hpp"

namespace sluice::cpu {
namespace {

inline std::uint32_t bits_of(float x) noexcept {
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(std::uint32_t bits) noexcept {
  float x = 0.f;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

/// Where the exponent of a float32 begins, and where the part of it begins that e4m3 keeps.
constexpr std::uint32_t kExponentShift = 23;
constexpr std::uint32_t kCodeShift = 20;

/// The scale of a row by the bits of its largest magnitude. 448 is 1.75 * 2^8: what is larger than 1.75 times its power
/// of two takes the next.
inline float scale_of(std::uint32_t largest) noexcept {
  constexpr std::uint32_t kInfinite = 0x7f80'0000u;
  constexpr std::uint32_t kAboveThat = 0x007f'ffffu - 0x0060'0000u;
  if (largest >= kInfinite) return __builtin_nanf("");
  const std::uint32_t least = bits_of(E4m3::kLeastScale) >> kExponentShift;
  const std::uint32_t most = bits_of(E4m3::kMostScale) >> kExponentShift;
  std::uint32_t exponent = (largest + kAboveThat) >> kExponentShift;
  exponent = exponent < least + 8 ? least : exponent - 8;
  return float_of((exponent < most ? exponent : most) << kExponentShift);
}

/// The code that is nearest to x, which is not NaN. On integers but for subnormals, where an addition rounds: 2^14 is a
/// float32 whose unit is theirs.
inline std::uint32_t code_of(float x) noexcept {
  constexpr float kUnit = 0x1p14f;
  constexpr std::uint32_t kHalf = (1u << (kCodeShift - 1)) - 1;
  const std::uint32_t bits = bits_of(x);
  std::uint32_t magnitude = bits & 0x7fff'ffffu;
  magnitude = magnitude < bits_of(E4m3::kLargest) ? magnitude : bits_of(E4m3::kLargest);
  const std::uint32_t rounded = (magnitude + kHalf + (magnitude >> kCodeShift & 1u)) >> kCodeShift;
  const std::uint32_t normal = rounded - ((127u - 7u) << 3);
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + kUnit) - bits_of(kUnit);
  return (bits >> 24 & 0x80u) | (magnitude < bits_of(0x1p-6f) ? subnormal : normal);
}

void encode_e4m3(const float* in, std::byte* codes, float* scale, std::size_t count) noexcept {
  std::uint32_t largest = 0;
  for (std::size_t c = 0; c < count; ++c) {
    const std::uint32_t magnitude = bits_of(in[c]) & 0x7fff'ffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  *scale = scale_of(largest);
  if (*scale != *scale) {
    for (std::size_t c = 0; c < count; ++c) codes[c] = std::byte{E4m3::kNaN};
    return;
  }
  const float inverse = float_of((254u << kExponentShift) - bits_of(*scale));  // Exact: it is a power of two.
  for (std::size_t c = 0; c < count; ++c) codes[c] = static_cast<std::byte>(code_of(in[c] * inverse));
}

void decode_e4m3(const std::byte* codes, float scale, float* out, std::size_t count) noexcept {
  for (std::size_t c = 0; c < count; c += kWidth)
    Simd::store(out + c, Simd::mul(Simd::load_as<DType::fp8_e4m3>(codes + c), Simd::set(scale)));
}

}  // namespace
}  // namespace sluice::cpu
