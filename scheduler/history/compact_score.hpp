#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace sluice::scheduler {

/// A score in 16 bits: no sign, 6 bits of exponent, 10 of mantissa. Code 0 is 0, code c any other
/// 2^(c / 1024 - 32) * (1 + c % 1024 / 1024): from 2^-32 to 2^32. Codes are ordered as what they stand for, and a
/// product with 2^n is a sum with n * kCodesPerOctave.
using ScoreCode = std::uint16_t;

inline constexpr std::uint32_t kCodesPerOctave = 1024;
inline constexpr ScoreCode kLargestCode = 0xffff;
inline constexpr double kSmallestScore = 0x1p-32;
/// By which rounding changes a score from kSmallestScore on, at most, as a share of it.
inline constexpr double kScoreError = 0x1p-11;

namespace score_bits {

inline constexpr std::uint32_t kDroppedBits = 23 - 10;          ///< of a float's mantissa
inline constexpr std::int32_t kFirstCode = (127 - 32) * 1024;  ///< of a float of 2^-32, as its upper bits have it

[[nodiscard]] constexpr ScoreCode code_of_bits(std::uint32_t bits) noexcept {
  const std::int32_t code = static_cast<std::int32_t>(bits >> kDroppedBits) - kFirstCode;
  return static_cast<ScoreCode>(std::clamp<std::int32_t>(code, 0, kLargestCode));
}

}  // namespace score_bits

/// The nearest code, the even one of two; the largest for what is above it. `score` >= 0.
[[nodiscard]] constexpr ScoreCode to_code(float score) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(score) & 0x7fff'ffffu;  // The two zeros are one.
  const std::uint32_t half = (1u << (score_bits::kDroppedBits - 1)) - 1 + ((bits >> score_bits::kDroppedBits) & 1);
  return score_bits::code_of_bits(bits + half);
}

/// The largest code that does not stand for more than `score` >= 0: a code is above it if and only if what it stands
/// for is above `score`.
[[nodiscard]] constexpr ScoreCode floor_code(double score) noexcept {
  if (!(score > 0.0)) return 0;
  const auto nearest = static_cast<float>(score);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  return score_bits::code_of_bits(nearest > score ? bits - 1 : bits);
}

[[nodiscard]] constexpr float from_code(ScoreCode code) noexcept {
  const std::uint32_t bits = (std::uint32_t{code} << score_bits::kDroppedBits) +
                             (static_cast<std::uint32_t>(score_bits::kFirstCode) << score_bits::kDroppedBits);
  return code == 0 ? 0.f : std::bit_cast<float>(bits);
}

}  // namespace sluice::scheduler
