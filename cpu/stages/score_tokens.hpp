#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/kernels/kernels.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

/// Scores of any tokens of one KV head in host memory, for policies that choose on the CPU: by the thread that calls.
/// Of shapes and pages that cpu::unsupported_reasons has nothing against; NaN in a key or a query is NaN in its scores.
namespace sluice::cpu {

/// out[i, h] = the score of q[h].k[tokens[i]], see AttentionShape.
struct ScoreTokensTask {
  const float* q = nullptr;  ///< [group, head_dim]
  KvView kv;
  std::span<const std::uint32_t> tokens;  ///< ascending
  float* out = nullptr;                   ///< [tokens, group]
};
void score_tokens(const Kernels& kernels, const ScoreTokensTask& task, const AttentionShape& shape) noexcept;

/// The same as estimated from 4-bit copies of the keys.
struct EstimateTokensTask {
  const float* q = nullptr;               ///< [group, head_dim]
  const std::byte* copies = nullptr;      ///< [frames, CodeLayout::page_bytes()]
  const float* mean = nullptr;            ///< [head_dim] the mean key of the copies; null: 0
  const std::uint32_t* frames = nullptr;  ///< [pages]
  std::span<const std::uint32_t> tokens;  ///< in any order
  float* out = nullptr;                   ///< [tokens, group]
};
/// `layout`: of the pages that were copied.
void estimate_tokens(const Kernels& kernels, const EstimateTokensTask& task, const AttentionShape& shape,
                     const PageLayout& layout) noexcept;

}  // namespace sluice::cpu
