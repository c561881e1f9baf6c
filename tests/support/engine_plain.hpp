#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

/// What cases of an Engine have in common that compare with the reference.
namespace sluice::test::plain {

inline constexpr AttentionShape kShape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
/// On a GPU queries and weights go through tensor cores, in two terms of the type that the pages have.
inline constexpr double kTolerance = 1e-3;

/// Room for `blocks` far and `near` near blocks.
inline EngineOptions options_for(const EngineRig& rig, std::uint32_t rows, std::uint32_t blocks, std::uint32_t near) {
  EngineOptions options{
      .shape = kShape, .kv_dtype = rig.kv_dtype, .largest = {.decode_rows = rows}, .threads = 2, .pin_threads = false};
  options.host_bytes = blocks * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.sequences = 8;
  options.import_rows = 100;
  return named(options, {"exact | int4 | top_k=512 | near=0,sinks=4,recent=508"});
}

/// Of the outputs from `offset` on.
inline double worst(const std::vector<float>& got, const std::vector<double>& want, std::size_t offset) {
  return difference(std::span(got).subspan(offset, want.size()), want);
}

/// Against the reference, all layers of one token. Of choices that float32 cannot tell apart, the nearer one counts.
inline double error_of(const std::vector<float>& got, const Story& story, std::uint32_t token, std::uint32_t sinks,
                       std::uint32_t recent, std::uint32_t picks) {
  double error = 0.0;
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    double here = worst(got, story.attended(layer, token, sinks, recent, picks), layer * row);
    if (!(here < kTolerance)) {
      for (const auto& other : story.attended_by_ties(layer, token, sinks, recent, picks))
        here = std::min(here, worst(got, other, layer * row));
    }
    error = std::max(error, here);
  }
  return error;
}

}  // namespace sluice::test::plain
