#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "tools/llama/likeliest.hpp"

namespace sluice::tools {

/// The likeliest token.
/// @throws Error{Errc::invalid_argument} if there is no number to choose.
[[nodiscard]] int argmax(std::span<const float> logits);

struct SamplerOptions {
  float temperature = 0.f;  ///< 0: greedy. Larger is flatter. [0, 100]
  float top_p = 1.f;        ///< sample among the likeliest tokens that hold this share of the mass. (0, 1]
  std::uint32_t top_k = 0;  ///< sample among this many of the likeliest tokens at most; 0: all
  std::uint64_t seed = 0;   ///< same seed, same logits, same tokens, on every platform
  friend bool operator==(const SamplerOptions&, const SamplerOptions&) = default;
};

/// Picks the next token. One per conversation: every draw advances the generator.
class Sampler {
 public:
  /// @throws Error{Errc::invalid_argument} naming the option that breaks its range.
  explicit Sampler(const SamplerOptions& options = {});

  /// @param logits  [vocab_size]; NaN counts as -infinity
  /// @throws Error{Errc::invalid_argument} if there is no finite logit to choose.
  [[nodiscard]] int next(std::span<const float> logits);
  /// Whether the likeliest token is always chosen, so that logits need not be looked at.
  [[nodiscard]] bool greedy() const noexcept { return options_.temperature == 0.f; }

 private:
  struct Choice {
    double weight;
    int token;
  };
  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<Choice> choices_;
};

}  // namespace sluice::tools
