#include "tools/llama/weights.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>

#include "sluice/engine_options.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/random_weights.hpp"

namespace sluice::tools {
namespace {

constexpr const char* kHead = "lm_head.weight";

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

/// Loads weights into ordinary memory and tells how far it came.
class Loader {
 public:
  Loader(const WeightSource& source, const WeightPlan& plan)
      : source_(source), total_bytes_(plan.parameters * sizeof(float)) {}

  [[nodiscard]] Linear matrix(const MatrixPlan& plan) {
    Linear linear{.outs = plan.outs(), .inner = plan.inner, .values = {}};
    linear.values.resize(elements(plan));
    std::span<float> rest(linear.values);
    for (const MatrixPart& part : plan.parts) {
      const auto out = rest.first(std::size_t{part.outs} * plan.inner);
      if (source_.checkpoint != nullptr) {
        source_.checkpoint->read(find_part(*source_.checkpoint, part, plan.inner), out);
      } else {
        draw(source_.seed, part, plan.deviation, out);
      }
      loaded(out);
      rest = rest.subspan(out.size());
    }
    return linear;
  }

  [[nodiscard]] std::vector<float> gain(const std::string& name, std::uint32_t count) {
    std::vector<float> values = load_gain(source_, name, count);
    loaded(values);
    return values;
  }

 private:
  void loaded(std::span<const float> values) {
    done_bytes_ += values.size_bytes();
    if (source_.progress) source_.progress(done_bytes_, total_bytes_);
  }

  const WeightSource& source_;
  std::uint64_t total_bytes_;
  std::uint64_t done_bytes_ = 0;
};

/// Name and shape of every tensor of a plan.
std::map<std::string, std::vector<std::uint64_t>> tensors_of(const WeightPlan& plan) {
  std::map<std::string, std::vector<std::uint64_t>> tensors;
  const auto add = [&](const MatrixPlan& matrix) {
    for (const MatrixPart& part : matrix.parts) tensors[part.name] = {part.outs, matrix.inner};
  };
  const std::uint64_t hidden = plan.embeddings.inner;
  add(plan.embeddings);
  for (const LayerPlan& layer : plan.layers) {
    for (const MatrixPlan* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) add(*matrix);
    for (const std::string& norm : {layer.attention_norm, layer.mlp_norm}) tensors[norm] = {hidden};
  }
  tensors[plan.final_norm] = {hidden};
  if (plan.own_head) add(*plan.own_head);
  return tensors;
}

/// Tables that follow from config.json, which old converters stored all the same.
bool is_rotary_table(std::string_view name) {
  for (const std::string_view table : {"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"}) {
    if (name.ends_with(table)) return true;
  }
  return false;
}

/// "1.5 GiB"
std::string gib(std::uint64_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f GiB", static_cast<double>(bytes) / static_cast<double>(GiB));
  return text.data();
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
                                 .parts = {{kEmbeddingsName, config.vocab_size}},
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
    plan.own_head = {.inner = hidden, .parts = {{kHead, config.vocab_size}}, .deviation = unit_deviation(hidden)};
    plan.parameters += elements(*plan.own_head);
  }
  return plan;
}

void require_match(const Checkpoint& checkpoint, const WeightPlan& plan) {
  const auto planned = tensors_of(plan);
  for (const auto& [name, shape] : planned) (void)checkpoint.find(name, shape);
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (planned.contains(name) || is_rotary_table(name)) continue;
    if (name != kHead) {
      throw Error(Errc::unsupported,
                  "tensor '" + name +
                      "' of the checkpoint has no place in the Llama that config.json describes, and "
                      "its part of the result would be lost; use a model without it");
    }
    if (!checkpoint.equal(tensor, checkpoint.tensors().find(kEmbeddingsName)->second)) {
      throw Error(Errc::corrupt, "'tie_word_embeddings' is true and the checkpoint has a '" + name +
                                     "' that differs from the embeddings; set it to false, or remove the tensor");
    }
  }
}

void require_memory(std::uint64_t needed_bytes, std::uint64_t free_bytes, const std::string& where) {
  if (needed_bytes <= free_bytes) return;
  throw Error(Errc::out_of_capacity, "the weights take " + gib(needed_bytes) + " of memory and " + where + " " +
                                         gib(free_bytes) + " free; free some, or use a larger GPU or a smaller model");
}

const StoredTensor& find_part(const Checkpoint& checkpoint, const MatrixPart& part, std::uint32_t inner) {
  return checkpoint.find(part.name, std::array<std::uint64_t, 2>{part.outs, inner});
}

std::vector<float> load_gain(const WeightSource& source, const std::string& name, std::uint32_t count) {
  if (source.checkpoint == nullptr) return std::vector<float>(count, 1.f);
  const StoredTensor& tensor = source.checkpoint->find(name, std::array<std::uint64_t, 1>{count});
  std::vector<float> values(count);
  source.checkpoint->read(tensor, values);
  return values;
}

Weights load_weights(const WeightSource& source, const ModelConfig& config) {
  const WeightPlan plan = plan_weights(config);
  // A config.json that lies costs an error, no memory.
  if (source.checkpoint != nullptr) require_match(*source.checkpoint, plan);
  require_memory(plan.parameters * sizeof(float), available_host_bytes(), "this machine has");
  Loader load(source, plan);
  Weights weights;
  load_planned(plan, config.hidden_size, load, weights);
  weights.parameters = plan.parameters;
  return weights;
}

}  // namespace sluice::tools
