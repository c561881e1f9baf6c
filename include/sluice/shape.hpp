#pragma once

#include <cstdint>

namespace sluice {

/// The attention shape of a model. `q_heads` is a multiple of `kv_heads` (grouped-query attention).
struct AttentionShape {
  std::uint32_t layers = 0;
  std::uint32_t q_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;  ///< 64, 96, 128, 192 or 256 on a GPU; any multiple of 16 up to 256 on the CPU

  /// Query heads that share one KV head. At most 32: group members are kept as bits.
  [[nodiscard]] constexpr std::uint32_t group() const noexcept { return q_heads / kv_heads; }
  friend constexpr bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const AttentionShape& shape);

}  // namespace sluice
