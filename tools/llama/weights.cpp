#include "tools/llama/weights.hpp"

#include <array>
#include <initializer_list>
#include <string>

namespace sluice::tools {
namespace {

/// One matrix of a stack: its name and how many rows it brings.
struct Part {
  std::string name;
  std::uint32_t outs;
};

/// Counts what it loads.
struct Loader {
  const Checkpoint& checkpoint;
  std::uint64_t parameters = 0;

  std::vector<float> vector(const std::string& name, std::uint32_t count) {
    const StoredTensor& tensor = checkpoint.find(name, std::array<std::uint64_t, 1>{count});
    std::vector<float> values(count);
    to_float(tensor, values);
    parameters += count;
    return values;
  }

  /// Memory is asked for after the file was found to hold that much: a lying config.json costs an error, no more.
  Linear stack(std::uint32_t inner, std::initializer_list<Part> parts) {
    std::vector<const StoredTensor*> tensors;
    Linear linear{.outs = 0, .inner = inner, .values = {}};
    for (const Part& part : parts) {
      tensors.push_back(&checkpoint.find(part.name, std::array<std::uint64_t, 2>{part.outs, inner}));
      linear.outs += part.outs;
    }
    linear.values.resize(std::size_t{linear.outs} * inner);
    std::span<float> rest(linear.values);
    for (const StoredTensor* tensor : tensors) {
      const std::size_t count = tensor->bytes.size() / bytes_of(tensor->dtype);
      to_float(*tensor, rest.first(count));
      rest = rest.subspan(count);
    }
    parameters += linear.values.size();
    return linear;
  }
};

}  // namespace

Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config) {
  const std::uint32_t hidden = config.hidden_size;
  const std::uint32_t inner = config.intermediate_size;
  const std::uint32_t q = config.num_attention_heads * config.head_dim;
  const std::uint32_t kv = config.num_key_value_heads * config.head_dim;

  Loader load{checkpoint};
  Weights weights;
  weights.embeddings = load.stack(hidden, {{"model.embed_tokens.weight", config.vocab_size}});
  for (std::uint32_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string at = "model.layers." + std::to_string(i) + ".";
    weights.layers.push_back(
        {.attention_norm = load.vector(at + "input_layernorm.weight", hidden),
         .qkv = load.stack(hidden, {{at + "self_attn.q_proj.weight", q},
                                    {at + "self_attn.k_proj.weight", kv},
                                    {at + "self_attn.v_proj.weight", kv}}),
         .output = load.stack(q, {{at + "self_attn.o_proj.weight", hidden}}),
         .mlp_norm = load.vector(at + "post_attention_layernorm.weight", hidden),
         .gate_up = load.stack(hidden, {{at + "mlp.gate_proj.weight", inner}, {at + "mlp.up_proj.weight", inner}}),
         .down = load.stack(inner, {{at + "mlp.down_proj.weight", hidden}})});
  }
  weights.final_norm = load.vector("model.norm.weight", hidden);
  if (!config.tie_word_embeddings) weights.own_head = load.stack(hidden, {{"lm_head.weight", config.vocab_size}});
  weights.parameters = load.parameters;
  return weights;
}

}  // namespace sluice::tools
