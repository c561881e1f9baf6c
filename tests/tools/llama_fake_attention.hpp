#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tools/llama/model.hpp"

namespace sluice::test {

/// Dense causal attention of one sequence, written as the formula reads: the model's arithmetic can be
/// tested without an engine.
class PlainAttention {
 public:
  explicit PlainAttention(const AttentionShape& shape) : shape_(shape), layers_(shape.layers) {}

  void operator()(const tools::AttentionCall& call) {
    Layer& layer = layers_[call.layer.value];
    const auto first = static_cast<std::uint32_t>(layer.k.size() / (shape_.kv_heads * shape_.head_dim));
    append(call.k, layer.k);
    append(call.v, layer.v);
    for (std::uint32_t row = 0; row < call.q.tokens; ++row) {
      for (std::uint32_t head = 0; head < shape_.q_heads; ++head) {
        attend(layer, first + row + 1, head / shape_.group(), floats(call.q, row, head),
               reinterpret_cast<float*>(call.out.row(row, head)));
      }
    }
  }

 private:
  struct Layer {
    std::vector<float> k;  ///< [tokens, kv_heads, head_dim]
    std::vector<float> v;
  };

  static const float* floats(const TensorView& view, std::uint32_t token, std::uint32_t head) {
    return reinterpret_cast<const float*>(view.row(token, head));
  }

  void append(const TensorView& view, std::vector<float>& to) const {
    for (std::uint32_t token = 0; token < view.tokens; ++token) {
      for (std::uint32_t head = 0; head < view.heads; ++head) {
        const float* row = floats(view, token, head);
        to.insert(to.end(), row, row + shape_.head_dim);
      }
    }
  }

  void attend(const Layer& layer, std::uint32_t tokens, std::uint32_t kv_head, const float* q, float* out) {
    const std::uint32_t dim = shape_.head_dim;
    const auto row = [&](const std::vector<float>& rows, std::uint32_t token) {
      return rows.data() + (std::size_t{token} * shape_.kv_heads + kv_head) * dim;
    };
    weights_.resize(tokens);
    for (std::uint32_t t = 0; t < tokens; ++t) {
      float dot = 0;
      const float* k = row(layer.k, t);
#pragma omp simd reduction(+ : dot)
      for (std::uint32_t c = 0; c < dim; ++c) dot += q[c] * k[c];
      weights_[t] = dot / std::sqrt(static_cast<float>(dim));
    }
    const float top = *std::max_element(weights_.begin(), weights_.end());
    double sum = 0;
    for (float& weight : weights_) sum += weight = std::exp(weight - top);
    std::fill_n(out, dim, 0.f);
    for (std::uint32_t t = 0; t < tokens; ++t) {
      const float* v = row(layer.v, t);
      const float weight = weights_[t] / static_cast<float>(sum);
#pragma omp simd
      for (std::uint32_t c = 0; c < dim; ++c) out[c] += weight * v[c];
    }
  }

  AttentionShape shape_;
  std::vector<Layer> layers_;
  std::vector<float> weights_;
};

/// A model without an engine: feeds tokens in chunks, and has the logits after the last one.
template <class Attention>
struct Decoder {
  explicit Decoder(const tools::Model& m, Stream* stream = nullptr)
      : model(m), attention(m.config().shape()), logits(m.config().vocab_size) {
    work.stream = stream;
  }

  void feed(std::span<const int> tokens, std::size_t chunk_tokens) {
    while (!tokens.empty()) {
      std::vector<tools::PlacedToken> placed;
      for (const int token : tokens.first(std::min(chunk_tokens, tokens.size()))) placed.push_back({token, position++});
      model.forward(placed, std::ref(attention), work);
      tokens = tokens.subspan(placed.size());
    }
    model.logits(work, 1, logits);
  }

  const tools::Model& model;
  Attention attention;
  tools::Activations work;
  std::uint32_t position = 0;
  std::vector<float> logits;
};

}  // namespace sluice::test
