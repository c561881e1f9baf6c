#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"

namespace sluice::test {

inline constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

/// All layers of tokens [at, at + count); the last layer's outputs go to `out`.
inline void prefill_chunk(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t at, std::uint32_t count,
                          std::vector<std::vector<float>>& out, bool ordered, bool last = false) {
  const AttentionShape& shape = toy.shape();
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    runtime.prefill({.sequence = id,
                     .layer = LayerId{layer},
                     .q = toy.q(layer, at, count),
                     .k = toy.k(layer, at, count),
                     .v = toy.v(layer, at, count),
                     .out = dense_view(out[layer].data() + at * row, DType::f32, count, shape.q_heads, shape.head_dim),
                     .ordered = ordered,
                     .last = last});
  }
}

inline std::vector<std::vector<float>> outputs(const Toy& toy) {
  const AttentionShape& shape = toy.shape();
  return {shape.layers, std::vector<float>(std::size_t{toy.tokens()} * shape.q_heads * shape.head_dim)};
}

/// Outputs [layers][tokens, q_heads, head_dim] of a prompt in chunks.
inline std::vector<std::vector<float>> prompt(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t tokens,
                                              std::uint32_t chunk, bool ordered) {
  auto out = outputs(toy);
  for (std::uint32_t at = 0; at < tokens; at += chunk) {
    prefill_chunk(runtime, id, toy, at, std::min(chunk, tokens - at), out, ordered);
  }
  runtime.synchronize();
  return out;
}

inline double worst_dense_error(const std::vector<std::vector<float>>& out, const Toy& toy, std::uint32_t tokens) {
  const std::size_t row = std::size_t{toy.shape().q_heads} * toy.shape().head_dim;
  double worst = 0.0;
  for (std::uint32_t layer = 0; layer < toy.shape().layers; ++layer) {
    for (std::uint32_t token = 0; token < tokens; ++token) {
      const std::vector<double> want = toy.dense(layer, token);
      for (std::size_t i = 0; i < row; ++i) {
        const double error = std::abs(want[i] - out[layer][token * row + i]);
        worst = error <= worst ? worst : error;
      }
    }
  }
  return worst;
}

inline RuntimeOptions options_with(std::uint32_t tokens, std::uint64_t near_pages) {
  RuntimeOptions options = toy_options(kShape, tokens);
  options.near_bytes = near_pages * options.layout().page_bytes();
  return options;
}

/// What a call that must fail says.
template <class Call>
std::string complaint(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Needs the fewest near pages: those of 4 sinks, of the last 16 tokens, and the open one.
inline PolicySpec modest() {
  PolicySpec spec = parse_policy("streaming");
  spec.near.sink_tokens = 4;
  spec.near.recent_tokens = 16;
  return spec;
}

inline constexpr std::uint64_t kForced =
    16;  ///< near pages that one modest sequence of two layers needs: 2 x 2 x 3, and few more

}  // namespace sluice::test
