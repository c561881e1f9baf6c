#pragma once

#include <cstdint>

#include "sluice/step/permutation.hpp"

/// What the keys and the queries of a SyntheticLayer have to agree on, and noise without state.
namespace sluice::tools::synthetic {

inline constexpr std::uint32_t kHeavySharedDims = 1;
inline constexpr float kSinkKey = 8.f;  ///< a sink's key in the sinks' dimension, the last one; all else in it is 0

inline std::uint64_t mix(std::uint64_t x) noexcept { return mixed_bits(x + 0x9e3779b97f4a7c15u); }

/// Unit-variance noise without state: the sum of four uniform 16-bit numbers, normal enough and cheap.
inline float noise(std::uint64_t stream, std::uint64_t index) noexcept {
  const std::uint64_t bits = mix(stream + mix(index));
  const auto sum =
      static_cast<float>((bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48));
  constexpr float kMean = 2.f * 65535.f;
  constexpr float kInverseDeviation = 1.f / (65536.f * 0.57735027f);
  return (sum - kMean) * kInverseDeviation;
}

inline std::uint64_t stream_of(std::uint64_t seed, std::uint64_t kv_head, std::uint64_t purpose) noexcept {
  return mix(mix(mix(seed) + kv_head) + purpose);
}

enum Purpose : std::uint64_t { kKeyNoise = 1, kValues = 2, kQueries = 3, kHeavy = 16 };

}  // namespace sluice::tools::synthetic
