#pragma once

#include <cstdint>

#include "cpu/stages/rows.hpp"
#include "sluice/step/prefill_tasks.hpp"

namespace sluice::cpu {

/// Some queries of one KV head's chunk: consecutive tokens, and consecutive heads of the group.
struct QueryRows {
  const std::byte* q = nullptr;  ///< as in PrefillTask
  std::uint32_t begin = 0;       ///< token of the chunk
  std::uint32_t count = 0;
  std::uint32_t head = 0;
  std::uint32_t heads = 0;
};

/// Widened and scaled, to out [count, heads, head_dim].
inline void load_queries(const QueryRows& rows, const PrefillShape& strides, const Kernels& kernels,
                         const AttentionShape& shape, float* out) {
  const std::uint32_t head_dim = shape.head_dim;
  const float scale = shape.score_scale();
  for (std::uint32_t t = 0; t < rows.count; ++t) {
    for (std::uint32_t h = 0; h < rows.heads; ++h, out += head_dim) {
      const std::uint64_t at =
          (rows.begin + std::uint64_t{t}) * strides.q_token_stride + (rows.head + h) * strides.q_head_stride;
      kernels_for(kernels, strides.q_dtype).widen(rows.q + at * bytes_of(strides.q_dtype), out, head_dim);
      for (std::uint32_t c = 0; c < head_dim; ++c) out[c] *= scale;
    }
  }
}

}  // namespace sluice::cpu
