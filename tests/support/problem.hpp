#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::test {

struct ProblemOptions {
  DType dtype = DType::bf16;
  std::uint32_t tokens = 100;
  std::uint32_t head_dim = 64;
  std::uint32_t group = 4;
  std::uint32_t page_tokens = 16;
  std::uint64_t seed = 1;
  /// One key in the middle is this much longer: its score leaves every other weight at 0 or is 0 itself.
  double outlier = 1.0;
  float scale = 0.f;  ///< as AttentionShape's
  float softcap = 0.f;
};

/// One KV head's cache with random contents and one token's queries. The pages lie in shuffled frames, between
/// frames that are poisoned with NaN, as are the rows beyond the last token.
class Problem {
 public:
  explicit Problem(const ProblemOptions& options);

  [[nodiscard]] const ProblemOptions& options() const noexcept { return options_; }
  [[nodiscard]] AttentionShape shape() const noexcept {
    return {.layers = 1,
            .q_heads = options_.group,
            .kv_heads = 1,
            .head_dim = options_.head_dim,
            .scale = options_.scale,
            .softcap = options_.softcap};
  }
  [[nodiscard]] const PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] KvView kv() const noexcept { return {.base = memory_.data(), .frames = frames_.data(), .layout = layout_}; }
  [[nodiscard]] const std::vector<std::uint32_t>& frames() const noexcept { return frames_; }
  /// All frames, those of no page too: what kv().base begins.
  [[nodiscard]] std::span<const std::byte> memory() const noexcept { return memory_; }
  [[nodiscard]] const float* q() const noexcept { return q_.data(); }
  [[nodiscard]] float q(std::uint32_t head, std::uint32_t c) const noexcept { return q_[head * options_.head_dim + c]; }
  /// Elements as they were stored, exactly.
  [[nodiscard]] double k(std::uint32_t token, std::uint32_t c) const noexcept { return k_[at(token, c)]; }
  [[nodiscard]] double v(std::uint32_t token, std::uint32_t c) const noexcept { return v_[at(token, c)]; }

  void set_q(std::uint32_t head, std::uint32_t c, float value) noexcept { q_[head * options_.head_dim + c] = value; }
  /// In a type with scales the row's other elements may be rounded anew.
  void set_k(std::uint32_t token, std::uint32_t c, double value);

 private:
  /// Rounds what `values` has of a token, and stores it.
  void store(std::vector<double>& values, std::uint32_t token);
  [[nodiscard]] std::size_t at(std::uint32_t token, std::uint32_t c) const noexcept {
    return std::size_t{token} * options_.head_dim + c;
  }

  ProblemOptions options_;
  PageLayout layout_;
  mutable std::vector<std::byte> memory_;
  std::vector<std::uint32_t> frames_;
  std::vector<float> q_;
  std::vector<double> k_;  ///< what the pages hold
  std::vector<double> v_;
};

/// Runs over whole pages that cover the first `tokens` tokens.
[[nodiscard]] std::vector<PageRun> runs_over(std::uint32_t tokens, std::uint32_t page_tokens);
/// A random ascending subset; each token with probability `share`.
[[nodiscard]] std::vector<std::uint32_t> random_tokens(std::uint32_t tokens, double share, std::uint64_t seed);

}  // namespace sluice::test
