#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/llama/config.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/safetensors.hpp"

namespace sluice::tools {

/// Name of the embeddings in the files.
inline constexpr const char* kEmbeddingsName = "model.embed_tokens.weight";

/// Where weights come from: a checkpoint or, without one, a seed.
struct WeightSource {
  const Checkpoint* checkpoint = nullptr;
  std::uint64_t seed = 0;
  LoadProgress progress = {};
};

/// One matrix of a stack: its name in the files and how many rows it brings.
struct MatrixPart {
  std::string name;
  std::uint32_t outs = 0;
};

/// Weights of y = x W^T. Products of the same input are stacked, so that a step makes fewer of them.
struct MatrixPlan {
  std::uint32_t inner = 0;
  std::vector<MatrixPart> parts;
  float deviation = 1.f;  ///< of random weights

  [[nodiscard]] std::uint32_t outs() const noexcept;
};

struct LayerPlan {
  std::string attention_norm;  ///< [hidden], as all norms
  MatrixPlan qkv;              ///< [q_heads + 2 * kv_heads] * head_dim rows: q, then k, then v
  MatrixPlan output;           ///< [hidden, q_heads * head_dim]
  std::string mlp_norm;
  MatrixPlan gate_up;  ///< [2 * intermediate, hidden]: gate, then up
  MatrixPlan down;     ///< [hidden, intermediate]
};

/// Every tensor of a model, before any memory is asked for.
struct WeightPlan {
  MatrixPlan embeddings;  ///< [vocab_size, hidden]
  std::vector<LayerPlan> layers;
  std::string final_norm;
  std::optional<MatrixPlan> own_head;  ///< [vocab_size, hidden]; none if tied to the embeddings
  std::uint64_t parameters = 0;
};
[[nodiscard]] WeightPlan plan_weights(const ModelConfig& config);

/// Compares a checkpoint with a plan before anything is read: every tensor is there and has its shape, and none is left
/// over but for the rotary tables that old converters stored. A head that should be tied must equal the embeddings.
/// @throws Error as Checkpoint::find; Error{Errc::unsupported} naming a tensor that nothing computes with;
///         Error{Errc::corrupt} for a head of its own beside `tie_word_embeddings`.
void require_match(const Checkpoint& checkpoint, const WeightPlan& plan);

/// @param where  what has the memory, with its verb: "this machine has"
/// @throws Error{Errc::out_of_capacity} that says how much is needed and how much is there.
void require_memory(std::uint64_t needed_bytes, std::uint64_t free_bytes, const std::string& where);

/// The file's tensor of a part.  @throws Error as Checkpoint::find.
[[nodiscard]] const StoredTensor& find_part(const Checkpoint& checkpoint, const MatrixPart& part, std::uint32_t inner);
/// The gain of a norm; all ones from a seed.  @throws Error as Checkpoint::find.
[[nodiscard]] std::vector<float> load_gain(const WeightSource& source, const std::string& name, std::uint32_t count);

/// Fills weights by what `load` makes of a matrix's plan and of a norm's name and size.
template <class Weights, class Loader>
void load_planned(const WeightPlan& plan, std::uint32_t hidden_size, Loader& load, Weights& weights) {
  weights.embeddings = load.matrix(plan.embeddings);
  for (const LayerPlan& layer : plan.layers) {
    weights.layers.push_back({.attention_norm = load.gain(layer.attention_norm, hidden_size),
                              .qkv = load.matrix(layer.qkv),
                              .output = load.matrix(layer.output),
                              .mlp_norm = load.gain(layer.mlp_norm, hidden_size),
                              .gate_up = load.matrix(layer.gate_up),
                              .down = load.matrix(layer.down)});
  }
  weights.final_norm = load.gain(plan.final_norm, hidden_size);
  if (plan.own_head) weights.own_head = load.matrix(*plan.own_head);
}

/// Weights in ordinary memory, float32.
struct Linear {
  std::uint32_t outs = 0;
  std::uint32_t inner = 0;
  std::vector<float> values;  ///< [outs, inner]
};

struct Layer {
  std::vector<float> attention_norm;
  Linear qkv;
  Linear output;
  std::vector<float> mlp_norm;
  Linear gate_up;
  Linear down;
};

struct Weights {
  Linear embeddings;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Linear own_head;  ///< empty if tied to the embeddings
  std::uint64_t parameters = 0;

  [[nodiscard]] const Linear& head() const noexcept { return own_head.values.empty() ? embeddings : own_head; }
};

/// Random weights are rounded to bf16, so that they are those of every device.
/// @throws Error as require_match, require_memory and Checkpoint::read.
[[nodiscard]] Weights load_weights(const WeightSource& source, const ModelConfig& config);

}  // namespace sluice::tools
