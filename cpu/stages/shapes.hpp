#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::cpu {

/// The shapes, pages and types that stages have kernels for.

[[nodiscard]] constexpr std::uint32_t most_head_dim(bool latent) noexcept {
  return latent ? kMostLatentDim : kMostHeadDim;
}
[[nodiscard]] constexpr bool supports(const AttentionShape& shape) noexcept {
  return shape.kv_heads != 0 && shape.q_heads % shape.kv_heads == 0 && shape.group() != 0 &&
         shape.group() <= kMaxGroup && shape.head_dim != 0 && shape.head_dim <= most_head_dim(shape.latent()) &&
         shape.head_dim % kHeadDimUnit == 0 && shape.value_dim <= shape.head_dim && shape.value_dim % kHeadDimUnit == 0;
}
[[nodiscard]] constexpr bool supports(const PageLayout& layout) noexcept {
  return layout.page_tokens != 0 && layout.head_dim != 0 && layout.head_dim <= most_head_dim(layout.latent) &&
         layout.head_dim % kHeadDimUnit == 0 && !(layout.latent && layout.scaled());
}

/// Why stages cannot serve the shape; empty if they can.
[[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout);

/// @throws Error{Errc::unsupported} naming the stage and the reasons.
[[noreturn]] void refuse(const char* stage, const AttentionShape& shape);
[[noreturn]] void refuse(const char* stage, const PageLayout& layout);
[[noreturn]] void refuse(const char* stage, const AttentionShape& shape, const PageLayout& layout);
[[noreturn]] void refuse(const char* stage, DType type);

inline void check(const char* stage, const AttentionShape& shape) {
  if (!supports(shape)) refuse(stage, shape);
}
inline void check(const char* stage, const PageLayout& layout) {
  if (!supports(layout)) refuse(stage, layout);
}
inline void check(const char* stage, const AttentionShape& shape, const PageLayout& layout) {
  if (!supports(shape) || !supports(layout) || layout.head_dim != shape.head_dim || layout.latent != shape.latent())
    refuse(stage, shape, layout);
}

/// What stages read and write but pages has no scales.
inline void check_tensor_type(const char* stage, DType type) {
  if (!is_tensor_type(type)) refuse(stage, type);
}

}  // namespace sluice::cpu
