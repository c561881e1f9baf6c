#pragma once

#include <cstdint>
#include <span>

namespace sluice::tools {

/// What a greedy decoder goes on with after a row: the token with the largest logit, the lowest one among equals. NaN
/// is never chosen. Kernels write it.
struct Likeliest {
  std::int32_t token = -1;  ///< -1: no logit is a number
  float logit = 0.f;
};

[[nodiscard]] Likeliest likeliest(std::span<const float> logits) noexcept;
/// @throws Error{Errc::invalid_argument} if there is none
[[nodiscard]] int token_of(const Likeliest& choice);

}  // namespace sluice::tools
