#include "tools/llama/weights.hpp"

#include <unistd.h>

#include <array>
#include <cmath>
#include <string>

#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/random_weights.hpp"

namespace sluice::tools {
namespace {

/// Keeps the variance of a product's results at that of its inputs.
float unit_deviation(std::uint32_t inner) { return 1.f / std::sqrt(static_cast<float>(inner)); }

LayerPlan plan_layer(const ModelConfig& config, std::uint32_t index) {
  const std::uint32_t hidden = config.hidden_size;
  const std::uint32_t inner = config.intermediate_size;
  const std::uint32_t q = config.num_attention_heads * config.head_dim;
  const std::uint32_t kv = config.num_key_value_heads * config.head_dim;
  const std::string at = "model.layers." + std::to_string(index) + ".";
  // 2 * layers products add to the residual stream; together they may add as much as one would.
  const float share = 1.f / std::sqrt(2.f * static_cast<float>(config.num_hidden_layers));
  return {.attention_norm = at + "input_layernorm.weight",
          .qkv = {.inner = hidden,
                  .parts = {{at + "self_attn.q_proj.weight", q},
                            {at + "self_attn.k_proj.weight", kv},
                            {at + "self_attn.v_proj.weight", kv}},
                  .deviation = unit_deviation(hidden)},
          .output = {.inner = q,
                     .parts = {{at + "self_attn.o_proj.weight", hidden}},
                     .deviation = share * unit_deviation(q)},
          .mlp_norm = at + "post_attention_layernorm.weight",
          .gate_up = {.inner = hidden,
                      .parts = {{at + "mlp.gate_proj.weight", inner}, {at + "mlp.up_proj.weight", inner}},
                      .deviation = unit_deviation(hidden)},
          .down = {.inner = inner,
                   .parts = {{at + "mlp.down_proj.weight", hidden}},
                   .deviation = share * unit_deviation(inner)}};
}

std::uint64_t elements(const MatrixPlan& plan) { return std::uint64_t{plan.outs()} * plan.inner; }

void draw(std::uint64_t seed, const MatrixPart& part, float deviation, std::span<float> out) {
  const std::uint64_t key = random_key(seed, part.name);
  for (std::uint64_t i = 0; i < out.size(); ++i) out[i] = from_bf16(to_bf16(random_normal(key, i) * deviation));
}

/// Memory is asked for after the file was found to hold that much: a lying config.json costs an error, no more.
Linear load_matrix(const WeightSource& source, const MatrixPlan& plan) {
  std::vector<const StoredTensor*> tensors;
  if (source.checkpoint != nullptr) {
    for (const MatrixPart& part : plan.parts) tensors.push_back(&find_part(*source.checkpoint, part, plan.inner));
  }
  Linear linear{.outs = plan.outs(), .inner = plan.inner, .values = {}};
  linear.values.resize(elements(plan));
  std::span<float> rest(linear.values);
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    const auto out = rest.first(std::size_t{plan.parts[i].outs} * plan.inner);
    if (source.checkpoint != nullptr) {
      to_float(*tensors[i], out);
    } else {
      draw(source.seed, plan.parts[i], plan.deviation, out);
    }
    rest = rest.subspan(out.size());
  }
  return linear;
}

void require_memory(const WeightPlan& plan) {
  const auto machine =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t needed = plan.parameters * sizeof(float);
  if (needed > machine / 10 * 8) {
    throw Error(Errc::out_of_capacity, "the weights take " + std::to_string(div_up(needed, GiB)) +
                                           " GiB in float32 and this machine has " + std::to_string(machine / GiB) +
                                           " GiB of memory; use a GPU or a smaller model");
  }
}

}  // namespace

std::uint32_t MatrixPlan::outs() const noexcept {
  std::uint32_t sum = 0;
  for (const MatrixPart& part : parts) sum += part.outs;
  return sum;
}

WeightPlan plan_weights(const ModelConfig& config) {
  const std::uint32_t hidden = config.hidden_size;
  WeightPlan plan{.embeddings = {.inner = hidden,
                                 .parts = {{"model.embed_tokens.weight", config.vocab_size}},
                                 .deviation = config.tie_word_embeddings ? unit_deviation(hidden) : 1.f},
                  .layers = {},
                  .final_norm = "model.norm.weight",
                  .own_head = {},
                  .parameters = 0};
  plan.parameters = elements(plan.embeddings) + hidden;
  for (std::uint32_t i = 0; i < config.num_hidden_layers; ++i) {
    const LayerPlan& layer = plan.layers.emplace_back(plan_layer(config, i));
    plan.parameters +=
        2 * hidden + elements(layer.qkv) + elements(layer.output) + elements(layer.gate_up) + elements(layer.down);
  }
  if (!config.tie_word_embeddings) {
    plan.own_head = {
        .inner = hidden, .parts = {{"lm_head.weight", config.vocab_size}}, .deviation = unit_deviation(hidden)};
    plan.parameters += elements(*plan.own_head);
  }
  return plan;
}

const StoredTensor& find_part(const Checkpoint& checkpoint, const MatrixPart& part, std::uint32_t inner) {
  return checkpoint.find(part.name, std::array<std::uint64_t, 2>{part.outs, inner});
}

std::vector<float> load_gain(const WeightSource& source, const std::string& name, std::uint32_t count) {
  if (source.checkpoint == nullptr) return std::vector<float>(count, 1.f);
  const StoredTensor& tensor = source.checkpoint->find(name, std::array<std::uint64_t, 1>{count});
  std::vector<float> values(count);
  to_float(tensor, values);
  return values;
}

Weights load_weights(const WeightSource& source, const ModelConfig& config) {
  const WeightPlan plan = plan_weights(config);
  if (source.checkpoint == nullptr) require_memory(plan);
  const std::uint32_t hidden = config.hidden_size;
  Weights weights;
  weights.embeddings = load_matrix(source, plan.embeddings);
  for (const LayerPlan& layer : plan.layers) {
    weights.layers.push_back({.attention_norm = load_gain(source, layer.attention_norm, hidden),
                              .qkv = load_matrix(source, layer.qkv),
                              .output = load_matrix(source, layer.output),
                              .mlp_norm = load_gain(source, layer.mlp_norm, hidden),
                              .gate_up = load_matrix(source, layer.gate_up),
                              .down = load_matrix(source, layer.down)});
  }
  weights.final_norm = load_gain(source, plan.final_norm, hidden);
  if (plan.own_head) weights.own_head = load_matrix(source, *plan.own_head);
  weights.parameters = plan.parameters;
  return weights;
}

}  // namespace sluice::tools
