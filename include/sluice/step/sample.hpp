#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace sluice {

/// Tokens drawn without replacement by their estimated softmax weight.
///
/// A query head perturbs the estimate e of each candidate by a Gumbel draw g and attends the M largest sums phi = e +
/// g: priority sampling (Duffield, Lund, Thorup, J. ACM 2007), as Gumbel top-k (Kool, van Hoof, Welling, arXiv
/// 1903.06059). Its weight exp(s) is divided by the chance pi that the token was drawn, so that numerator and
/// denominator of the softmax are unbiased, however good the estimates are (Horvitz and Thompson, 1952): the logit is
/// s - ln pi.
///
/// Given the draws of all other tokens, a head draws a token if its phi exceeds the head's threshold: the (M+1)-th
/// largest phi for a token that is among the M largest, the M-th for any other. With E = exp(-g), which is exponential,
/// that has the chance 1 - exp(-y), where y = exp(e - threshold). What one head of a KV head draws all of them attend:
/// with the chance 1 - exp(-sum of y) if their draws are independent, 1 - exp(-largest y) if they share them.
///
/// The relative standard error of a head's softmax sum is about sqrt(M) exp(kappa) / sum, where kappa is the (M+1)-th
/// largest phi: its error bar. A head may be asked to draw the fewest of M, 2M, 4M, ... tokens, up to a bound B, whose
/// bar is at most an error E. That is judged by estimates, before any key is read. Of the B tokens with the largest phi
/// each had the chance pi at their threshold kappa_B, and
///
///   sum     = sum of exp(e) over what is attended anyway + sum of exp(e) / pi over the B tokens
///   enough  = ln(E sum / sqrt(m)), the threshold with which m tokens have the bar E
///   n       = sum of (1 - exp(-exp(e - enough))) / pi over the B tokens: as many are drawn with it, about
///
/// m tokens do if n is at most m. This looks at which tokens are among the B, not at their order: with any other phi
/// for which the head still draws a token it draws as many, so that the token's chance is that of a fixed number. By
/// the bars of the m tokens themselves heads would stop where their draws happen to be low, which is a bias.

/// Every bit of the result depends on every bit of `x`; different for every x.
[[nodiscard]] constexpr std::uint32_t mix_bits(std::uint32_t x) noexcept {
  x ^= x >> 16;
  x *= 0x7feb'352du;
  x ^= x >> 15;
  x *= 0x846c'a68bu;
  return x ^ x >> 16;
}

/// Draws of the query heads of a KV head: a function of these numbers and the token's position alone.
struct HeadDraws {
  std::uint32_t key = 0;
  std::uint32_t heads = 0;  ///< query head h has the draws of h % heads; 0: there are none

  [[nodiscard]] constexpr bool any() const noexcept { return heads != 0; }
  [[nodiscard]] constexpr std::uint32_t key_of(std::uint32_t head) const noexcept {
    return mix_bits(key + head % heads);
  }
  /// 32 random bits for a token of a head with such a key.
  [[nodiscard]] static constexpr std::uint32_t bits(std::uint32_t head_key, std::uint32_t token) noexcept {
    return mix_bits(head_key + token * 0x9e37'79b9u);
  }
  /// A number in (0, 1), fine where it is small.
  [[nodiscard]] static constexpr float uniform(std::uint32_t bits) noexcept {
    const float x = static_cast<float>(bits) * 0x1p-32f + 0x1p-33f;
    return x < 1.f - 0x1p-24f ? x : 1.f - 0x1p-24f;
  }
};

/// Draws of a row.
struct SampleDraws {
  enum class Kind : std::uint32_t {
    none,
    head,   ///< each query head has its own
    group,  ///< the query heads of a KV head share one
  };
  std::uint32_t key = 0;
  Kind kind = Kind::none;
  std::uint32_t least = 0;  ///< tokens that each query head draws, or at first
  float error = 0.f;        ///< a head whose error bar exceeds it draws more, if `picks` of its row are more

  [[nodiscard]] constexpr bool any() const noexcept { return kind != Kind::none; }
  [[nodiscard]] constexpr SampleDraws in(std::uint32_t layer) const noexcept {
    if (!any()) return {};
    return {.key = mix_bits(key ^ mix_bits(layer + 1)), .kind = kind, .least = least, .error = error};
  }
  /// Of a KV head with `group` query heads.
  [[nodiscard]] constexpr HeadDraws of(std::uint32_t kv_head, std::uint32_t group) const noexcept {
    if (!any()) return {};
    return {.key = mix_bits(key ^ mix_bits(~kv_head)), .heads = kind == Kind::head ? group : 1};
  }
  friend constexpr bool operator==(const SampleDraws&, const SampleDraws&) = default;
};

/// What a query head has drawn by: scores above `largest_left` are drawn. Minus infinity: there is nothing left.
struct DrawThresholds {
  float largest_left = -std::numeric_limits<float>::infinity();  ///< the (M+1)-th largest score
  float least_drawn = -std::numeric_limits<float>::infinity();   ///< the M-th
  std::uint32_t drawn = 0;                                       ///< M
};

/// Tokens that a head draws if `drawn` are too few, of `most`.
[[nodiscard]] constexpr std::uint32_t more_draws(std::uint32_t drawn, std::uint32_t most) noexcept {
  return drawn < most - drawn ? 2 * drawn : most;
}

/// Error bars in millionths: beyond a million times the sum they say no more.
struct ErrorBar {
  static constexpr float kMost = 1e6f;
  static constexpr std::uint32_t kWide = 100'000;  ///< 10%
};

/// The exponential number that a draw is: -ln(1 - u).
[[nodiscard]] inline float exponential_draw(std::uint32_t head_key, std::uint32_t token) noexcept {
  return -std::log1p(-HeadDraws::uniform(HeadDraws::bits(head_key, token)));
}
/// What is added to a token's estimate.
[[nodiscard]] inline float gumbel_draw(std::uint32_t head_key, std::uint32_t token) noexcept {
  return -std::log(exponential_draw(head_key, token));
}

/// y of a token: its perturbed score, the exponential number that perturbed it, and the head's thresholds. A score that
/// is not a number is never drawn.
[[nodiscard]] inline float draw_rate(float score, float exponential, const DrawThresholds& thresholds) noexcept {
  const float above = score - (score > thresholds.largest_left ? thresholds.largest_left : thresholds.least_drawn);
  if (above == above) return exponential * std::exp(above);
  return score == score ? std::numeric_limits<float>::infinity() : 0.f;
}
/// What is added to the logits of a token that was drawn at such a rate: -ln pi.
[[nodiscard]] inline float draw_correction(float rate) noexcept { return -std::log(-std::expm1(-rate)); }

}  // namespace sluice
