#pragma once

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/engine.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::runtime {

/// What is wrong with the options, by name.  @throws Error{Errc::invalid_argument}
void validate(const EngineOptions& options);

/// Of a channel of keys' copies; 0: there are none, as rows choose by scores of the caller and no policy names a width.
[[nodiscard]] inline std::uint32_t code_bits_of(const EngineOptions& options) noexcept {
  if (options.code_bits != 0) return options.code_bits;
  return options.largest.scores ? 0 : kCodeBits;
}

[[nodiscard]] inline scheduler::ForwardLimits limits_of(const EngineOptions& options) noexcept {
  scheduler::RowShape shape = scheduler::row_shape(attended_shape(options.shape), options.page_tokens);
  shape.dense_tokens = options.dense_tokens == kDenseAuto ? 0 : options.dense_tokens;
  return {.shape = shape,
          .max_window = options.max_window,
          .digests = options.digests,
          .cluster_sequences = options.cluster_sequences,
          .code_bits = code_bits_of(options),
          .latent = options.shape.latent()};
}

/// Of pages in host memory.
[[nodiscard]] inline PageLayout far_layout(const EngineOptions& options) noexcept {
  return {.page_tokens = options.page_tokens,
          .head_dim = options.shape.head_dim,
          .dtype = options.kv_dtype,
          .latent = options.shape.latent()};
}

/// @throws Error{Errc::unsupported} naming what an engine of these options lacks to serve the policy.
void require_served(const PolicySpec& policy, const EngineOptions& options);

/// As sluice::make_room_for.
void make_room(const PolicySpec& policy, std::uint32_t tokens, EngineOptions& options);

}  // namespace sluice::runtime
