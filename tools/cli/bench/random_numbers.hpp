#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <span>

namespace sluice::tools {

/// Normal random numbers of bf16, always the same. Truncated: random is random.
inline void fill_random_bf16(std::span<std::uint16_t> out) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (std::uint16_t& each : out) {
    const float value = normal(rng);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    each = static_cast<std::uint16_t>(bits >> 16);
  }
}

}  // namespace sluice::tools
