#pragma once

#include <cstdint>
#include <vector>

#include "tools/llama/config.hpp"
#include "tools/llama/safetensors.hpp"

namespace sluice::tools {

/// Weights of y = x W^T, float32.
struct Linear {
  std::uint32_t outs = 0;
  std::uint32_t inner = 0;
  std::vector<float> values;  ///< [outs, inner]
};

/// One transformer layer. Products of the same input are stacked, so that a step makes fewer of them.
struct Layer {
  std::vector<float> attention_norm;  ///< [hidden]
  Linear qkv;                         ///< [q_heads + 2 * kv_heads] * head_dim rows: q, then k, then v
  Linear output;                      ///< [hidden, q_heads * head_dim]
  std::vector<float> mlp_norm;        ///< [hidden]
  Linear gate_up;                     ///< [2 * intermediate, hidden]: gate, then up
  Linear down;                        ///< [hidden, intermediate]
};

struct Weights {
  Linear embeddings;  ///< [vocab_size, hidden]
  std::vector<Layer> layers;
  std::vector<float> final_norm;  ///< [hidden]
  Linear own_head;                ///< [vocab_size, hidden]; empty if tied to the embeddings
  std::uint64_t parameters = 0;

  [[nodiscard]] const Linear& head() const noexcept { return own_head.values.empty() ? embeddings : own_head; }
};

/// @throws Error as Checkpoint::find.
[[nodiscard]] Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace sluice::tools
