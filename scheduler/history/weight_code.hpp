#pragma once

#include <array>
#include <cstdint>
#include <numbers>

namespace sluice::scheduler {

/// What a step adds to a history, in a byte: code c weighs 2^(-c / kWeightsPerOctave) of the step's largest weight.
/// Rounding changes a weight by 4.4% at most, which a score's decayed sum of many averages out.
using WeightCode = std::uint8_t;

inline constexpr std::uint32_t kWeightsPerOctave = 8;
/// Weights of less than 2^-20 of the largest are none: a mean score is more than that at any length.
inline constexpr std::uint32_t kWeightCodes = 20 * kWeightsPerOctave;
/// Codes that a score is below the largest, by its distance from it.
inline constexpr float kWeightsPerNat = std::numbers::log2e_v<float> * kWeightsPerOctave;

namespace weight_table {

consteval std::array<float, kWeightCodes> all_weights() {
  constexpr double kEighth = 0.91700404320467123174;  // 2^(-1/8)
  std::array<float, kWeightCodes> weights{};
  double octave = 1.0;
  for (std::uint32_t first = 0; first < kWeightCodes; first += kWeightsPerOctave, octave /= 2) {
    double weight = octave;
    for (std::uint32_t i = 0; i < kWeightsPerOctave; ++i, weight *= kEighth)
      weights[first + i] = static_cast<float>(weight);
  }
  return weights;
}

}  // namespace weight_table

inline constexpr std::array<float, kWeightCodes> kWeights = weight_table::all_weights();

/// The nearest code of a weight e^-below of the largest; kWeightCodes if it is none. NaN is none.
[[nodiscard]] inline std::uint32_t weight_code(float below) noexcept {
  const float codes = below * kWeightsPerNat + 0.5f;
  return codes >= 0.5f && codes < static_cast<float>(kWeightCodes) ? static_cast<std::uint32_t>(codes) : kWeightCodes;
}

}  // namespace sluice::scheduler
