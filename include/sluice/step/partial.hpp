#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace sluice {

/// Attention over a subset of one sequence's tokens, in the form in which subsets merge.
///
/// The contract, identical on CPU and GPU (row = query head):
///   out  [rows, head_dim]  float32, softmax-normalised within the subset; of latent attention the first
///                          AttentionShape::value_dim elements of a row are what is wanted, the others say nothing
///   lse  [rows]            natural log of the sum of exp(score); of scores see AttentionShape
///   empty subset           out == 0 and lse == -infinity
/// Both arrays are dense and belong to the caller.
struct Partial {
  float* out = nullptr;
  float* lse = nullptr;
};

inline constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

/// How much each of two disjoint subsets weighs in their union, and the union's lse.
struct MergeWeights {
  float a = 0.f;
  float b = 0.f;
  float lse = kEmptyLse;
};

/// The merge algebra, in its one home. Two empty subsets stay empty: (-inf) - (-inf) is NaN, hence the guard.
[[nodiscard]] inline MergeWeights merge_weights(float lse_a, float lse_b) noexcept {
  const float top = lse_a > lse_b ? lse_a : lse_b;
  if (top == kEmptyLse) return {};
  const float a = std::exp(lse_a - top);
  const float b = std::exp(lse_b - top);
  const float sum = a + b;
  return {.a = a / sum, .b = b / sum, .lse = top + std::log(sum)};
}

}  // namespace sluice
