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
  // How a score comes from q.k, for verbs; an engine is told by EngineOptions::scale and ::softcap, and leaves these 0.
  float scale = 0.f;    ///< factor; 0: 1 / sqrt(head_dim)
  float softcap = 0.f;  ///< 0: none; else what was scaled, s, becomes softcap * tanh(s / softcap)

  /// Query heads that share one KV head. At most 32: group members are kept as bits.
  [[nodiscard]] constexpr std::uint32_t group() const noexcept { return q_heads / kv_heads; }
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

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const AttentionShape& shape);

}  // namespace sluice
