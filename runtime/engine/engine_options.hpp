#pragma once

#include "runtime/engine/engine_sizes.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/engine.hpp"

namespace sluice::runtime {

/// What is wrong with the options, by name.  @throws Error{Errc::invalid_argument}
void validate(const EngineOptions& options);

[[nodiscard]] inline scheduler::ForwardLimits limits_of(const EngineOptions& options,
                                                        const EngineSizes& sizes) noexcept {
  scheduler::RowShape shape = scheduler::row_shape(attended_shape(options.shape), options.page_tokens);
  shape.dense_tokens = options.dense_tokens == kDenseAuto ? 0 : options.dense_tokens;
  return {.shape = shape,
          .max_window = sizes.max_window,
          .digests = sizes.digests,
          .cluster_sequences = sizes.cluster_sequences,
          .code_bits = sizes.code_bits,
          .latent = options.shape.latent()};
}

/// Of pages in host memory.
[[nodiscard]] inline PageLayout far_layout(const EngineOptions& options) noexcept {
  return {.page_tokens = options.page_tokens,
          .head_dim = options.shape.head_dim,
          .dtype = options.kv_dtype,
          .latent = options.shape.latent()};
}

/// @throws Error{Errc::unsupported} naming what an engine of these options and sizes lacks to serve the policy.
void require_served(const PolicySpec& policy, const EngineOptions& options, const EngineSizes& sizes);

}  // namespace sluice::runtime
