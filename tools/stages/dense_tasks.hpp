#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sluice/step/partial.hpp"
#include "sluice/tensor.hpp"

/// What dense attention to a cache of one's own takes besides attending: the rival that benchmarks measure against.
namespace sluice::tools {

/// Writes `count` tokens of one KV head into consecutive rows of one page, converting to the page's dtype.
struct AppendTask {
  const std::byte* k = nullptr;  ///< first row; later rows every `token_stride` elements
  const std::byte* v = nullptr;  ///< not read if the page's layout is latent
  DType dtype = DType::f32;
  std::uint64_t token_stride = 0;
  std::byte* page = nullptr;
  std::uint32_t first_row = 0;
  std::uint32_t count = 0;
};

/// Copies rows [tokens, heads, head_dim] of a tensor to dense float32; `out` may be pinned host memory.
struct ToF32Task {
  TensorView in;
  float* out = nullptr;
};

/// Merges partials over disjoint subsets, row by row, into a caller's tensor of any dtype. One KV head: its rows are
/// the group's query heads.
struct MergeTask {
  std::span<const Partial> parts;  ///< at least one, each [group, head_dim] and [group]
  std::byte* out = nullptr;        ///< [group, AttentionShape::out_dim()] in `out_dtype`, rows dense
  float* lse = nullptr;            ///< [group]; may be null
};

}  // namespace sluice::tools
