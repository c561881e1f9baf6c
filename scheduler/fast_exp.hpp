#pragma once

#include <bit>
#include <cstdint>
#include <numbers>

namespace sluice::scheduler {

/// exp(x) for x <= 0, to 3e-7 relative; 0 below -87 and for NaN. Branch-free, so that `omp simd` loops over it
/// vectorise, which they do not over std::exp.
[[nodiscard]] inline float fast_exp(float x) noexcept {
  constexpr float kLn2High = 0.693359375f;  // 9 bits: its product with a small integer is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float y = x > -87.f ? x : -87.f;
  const float rounded = y * std::numbers::log2e_v<float> + kRound;
  const float k = rounded - kRound;
  const float r = (y - k * kLn2High) - k * kLn2Low;
  float p = 1.f / 720.f;
  p = p * r + 1.f / 120.f;
  p = p * r + 1.f / 24.f;
  p = p * r + 1.f / 6.f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(rounded) << 23) + (127u << 23);
  const float value = p * std::bit_cast<float>(power);
  return x > -87.f ? value : 0.f;
}

}  // namespace sluice::scheduler
