#pragma once

#include <cmath>
#include <cstdint>

#include "sluice/error.hpp"

namespace sluice {

/// The attention shape of a model. `q_heads` is a multiple of `kv_heads` (grouped-query attention).
struct AttentionShape {
  std::uint32_t layers = 0;
  std::uint32_t q_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;  ///< 64, 96, 128, 192 or 256 on a GPU; any multiple of 16 up to 256 on the CPU
  /// 0: each token has a key and a value of head_dim. Else latent attention in absorbed form (DeepSeek-V2, arXiv
  /// 2405.04434, section 2.1.2), on the CPU: the value of a token is the first value_dim elements of its key, which
  /// alone is stored; kv_heads is 1, and head_dim at most kMostLatentDim. A multiple of 16 up to head_dim; DeepSeek V2
  /// and V3 have 512 of 576.
  std::uint32_t value_dim = 0;
  // How a score comes from q.k, for verbs; an engine is told by EngineOptions::scale and ::softcap, and leaves these 0.
  float scale = 0.f;    ///< factor; 0: 1 / sqrt(head_dim)
  float softcap = 0.f;  ///< 0: none; else what was scaled, s, becomes softcap * tanh(s / softcap)

  /// Query heads that share one KV head. At most 32, but for latent attention: group members are kept as bits.
  [[nodiscard]] constexpr std::uint32_t group() const noexcept { return q_heads / kv_heads; }
  [[nodiscard]] constexpr bool latent() const noexcept { return value_dim != 0; }
  /// Elements of a query head's output.
  [[nodiscard]] constexpr std::uint32_t out_dim() const noexcept { return latent() ? value_dim : head_dim; }
  /// What q.k is multiplied by: its one home.
  [[nodiscard]] float score_scale() const noexcept {
    return scale != 0.f ? scale : 1.f / std::sqrt(static_cast<float>(head_dim));
  }
  /// A score that was scaled, soft-capped if there is a cap.
  template <class Float>
  [[nodiscard]] Float capped(Float score) const noexcept {
    const auto cap = static_cast<Float>(softcap);
    return softcap == 0.f ? score : cap * std::tanh(score / cap);
  }
  friend constexpr bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

/// Query heads that attend together, at most: which of them attend a row is kept as bits.
inline constexpr std::uint32_t kMostGroup = 32;
/// Elements of a key, at most: of latent attention, and otherwise.
inline constexpr std::uint32_t kMostLatentDim = 576;
inline constexpr std::uint32_t kMostHeadDim = 256;

/// As an engine attends it. More than kMostGroup query heads of latent attention choose and attend in equal groups, as
/// few as there can be: these take the place of its one KV head, whose keys all of them read.
[[nodiscard]] constexpr AttentionShape attended_shape(AttentionShape shape) noexcept {
  while (shape.latent() && (shape.q_heads % shape.kv_heads != 0 || shape.group() > kMostGroup)) ++shape.kv_heads;
  return shape;
}

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const AttentionShape& shape);

}  // namespace sluice
