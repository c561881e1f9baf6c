#include "tools/llama/config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "sluice/error.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_fields.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostConfigBytes = std::uint64_t{1} << 24;

/// Well above every published model: beyond it, a number is damage, and nothing may be sized by it.
struct Limit {
  const char* name;
  std::uint32_t ModelConfig::*field;
  std::uint32_t most;
};
constexpr std::array kLimits{Limit{"hidden_size", &ModelConfig::hidden_size, 1u << 20},
                             Limit{"intermediate_size", &ModelConfig::intermediate_size, 1u << 22},
                             Limit{"num_hidden_layers", &ModelConfig::num_hidden_layers, 1u << 12},
                             Limit{"num_attention_heads", &ModelConfig::num_attention_heads, 1u << 14},
                             Limit{"num_key_value_heads", &ModelConfig::num_key_value_heads, 1u << 14},
                             Limit{"head_dim", &ModelConfig::head_dim, 1u << 14},
                             Limit{"vocab_size", &ModelConfig::vocab_size, 1u << 24},
                             Limit{"max_position_embeddings", &ModelConfig::max_position_embeddings, 1u << 28}};

/// What no model can have; nothing if all is well.
std::optional<std::string> contradiction(const ModelConfig& config) {
  for (const Limit& limit : kLimits) {
    const std::uint32_t value = config.*limit.field;
    if (value == 0 || value > limit.most) {
      return std::string("'") + limit.name + "' is " + std::to_string(value) + "; models have from 1 to " +
             std::to_string(limit.most);
    }
  }
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return "'num_attention_heads' must be a multiple of num_key_value_heads";
  }
  if (config.head_dim % 2 != 0) return "'head_dim' must be even: RoPE rotates pairs";
  if (!(config.rope_theta >= 1)) return "'rope_theta' must be at least 1: no pair turns faster than the first";
  return std::nullopt;
}

/// Keys of Llama's relatives that change what a layer computes, and the value at which they do not.
struct Neutral {
  const char* name;
  const char* value;
};
constexpr std::array kNeutral{Neutral{"hidden_act", "\"silu\""},
                              Neutral{"attention_bias", "false"},
                              Neutral{"mlp_bias", "false"},
                              Neutral{"quantization_config", "null"},
                              Neutral{"compression_config", "null"},
                              Neutral{"partial_rotary_factor", "1.0"},
                              Neutral{"rope_interleave", "false"},
                              Neutral{"attention_chunk_size", "null"},
                              Neutral{"attn_logit_softcapping", "null"},
                              Neutral{"final_logit_softcapping", "null"},
                              Neutral{"qk_norm", "false"},
                              Neutral{"use_qk_norm", "false"},
                              Neutral{"attention_multiplier", "null"},
                              Neutral{"embedding_multiplier", "1.0"},
                              Neutral{"residual_multiplier", "1.0"},
                              Neutral{"logits_scaling", "1.0"},
                              Neutral{"num_experts", "null"},
                              Neutral{"num_local_experts", "null"}};

constexpr const char* kOtherModels =
    "; the command runs LlamaForCausalLM and MistralForCausalLM ('llama', 'mistral'), `python -m sluice` most others";

void require_type(const Fields& fields) {
  const auto type = fields.text("model_type");
  if (type != "llama" && type != "mistral") {
    fields.fail("model_type", (type ? "is " + shown(*type) : "is missing") + kOtherModels, Errc::unsupported);
  }
  const json* classes = fields.find("architectures");
  for (const json& name : classes == nullptr ? json::array() : *classes) {
    if (name != "LlamaForCausalLM" && name != "MistralForCausalLM") {
      fields.fail("architectures", "has " + shown(name) + kOtherModels, Errc::unsupported);
    }
  }
}

/// Refuses what would silently compute something else.
void require_supported(const Fields& fields, const ModelConfig& config) {
  const auto refuse = [&](const char* name, const json& value, const std::string& only) {
    fields.fail(name, "is " + shown(value) + "; this host computes with " + only + " only, use another model",
                Errc::unsupported);
  };
  for (const auto& [name, neutral] : kNeutral) {
    const json* value = fields.find(name);
    if (value != nullptr && *value != json::parse(neutral)) refuse(name, *value, neutral);
  }
  // A window that is as long as the context hides nothing.
  const json* window = fields.find("sliding_window");
  if (window != nullptr && (!window->is_number_unsigned() || *window < config.max_position_embeddings)) {
    refuse("sliding_window", *window, "null");
  }
  const json* types = fields.find("layer_types");
  for (const json& type : types == nullptr ? json::array() : *types) {
    if (type != "full_attention") refuse("layer_types", *types, "full_attention");
  }
}

/// What rope_scaling says, or rope_parameters in newer files.
struct Rope {
  std::optional<double> theta;
  std::optional<RopeScaling> scaling;
};

/// "default" if none is given.
std::string rope_type(const Fields& rope) {
  const auto type = rope.text("rope_type");
  const auto older = rope.text("type");  // the key's older name
  if (type && older && *type != *older) rope.fail("type", "is " + shown(*older) + " and 'rope_type' " + shown(*type));
  std::string name = type ? *type : older.value_or("default");
  if (name != "llama3" && name != "default") {
    rope.fail("rope_type", "is " + shown(name) + "; this host has 'llama3' and 'default'", Errc::unsupported);
  }
  return name;
}

RopeScaling read_scaling(const Fields& rope) {
  const RopeScaling scaling{
      .factor = rope.required_positive("factor"),
      .low_freq_factor = rope.required_positive("low_freq_factor"),
      .high_freq_factor = rope.required_positive("high_freq_factor"),
      .original_max_position_embeddings = rope.required_count("original_max_position_embeddings")};
  if (scaling.factor < 1) rope.fail("factor", "must be at least 1");
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    rope.fail("high_freq_factor", "must be larger than low_freq_factor");
  }
  return scaling;
}

Rope read_rope(const Fields& rope) {
  constexpr std::array kPlain{"rope_type", "type", "rope_theta"};
  constexpr std::array kScaled{"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
  const std::string type = rope_type(rope);
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || std::find(kPlain.begin(), kPlain.end(), key) != kPlain.end()) continue;
    if (std::find(kScaled.begin(), kScaled.end(), key) == kScaled.end()) {
      rope.fail(key, "is " + shown(value) + "; this host does not know it", Errc::unsupported);
    }
    if (type == "default") rope.fail(key, "is " + shown(value) + ", and no 'rope_type' says what for");
  }
  return {.theta = rope.positive("rope_theta"),
          .scaling = type == "llama3" ? std::optional(read_scaling(rope)) : std::nullopt};
}

/// An empty object says nothing.
std::optional<Rope> find_rope(const Fields& fields, const char* name, const std::string& origin) {
  const json* object = fields.find(name);
  if (object == nullptr || (object->is_object() && object->empty())) return std::nullopt;
  return read_rope(Fields(*object, origin + ": '" + name + "'"));
}

void read_rope(const Fields& fields, const std::string& origin, ModelConfig& config) {
  const auto older = find_rope(fields, "rope_scaling", origin);
  const auto newer = find_rope(fields, "rope_parameters", origin);
  if (older && newer && older->scaling != newer->scaling) {
    fields.fail("rope_scaling", "and 'rope_parameters' disagree; remove one of them");
  }
  std::optional<double> theta = fields.positive("rope_theta");
  for (const auto& rope : {older, newer}) {
    if (!rope || !rope->theta) continue;
    if (theta && *theta != *rope->theta) {
      fields.fail("rope_theta", "is given twice and differs; remove one of them");
    }
    theta = rope->theta;
  }
  config.rope_theta = theta.value_or(config.rope_theta);
  if (older || newer) config.rope_scaling = older ? older->scaling : newer->scaling;
}

}  // namespace

bool ModelConfig::is_eos(int token) const noexcept {
  return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
}

void validate(const ModelConfig& config) {
  if (const auto why = contradiction(config)) throw Error(Errc::invalid_argument, "the model's config: " + *why);
}

ModelConfig parse_config(std::string_view text, const std::string& origin) {
  const json document = parse_json(text, origin);
  const Fields fields(document, origin);
  require_type(fields);

  ModelConfig config;
  config.hidden_size = fields.required_count("hidden_size");
  config.intermediate_size = fields.required_count("intermediate_size");
  config.num_hidden_layers = fields.required_count("num_hidden_layers");
  config.num_attention_heads = fields.required_count("num_attention_heads");
  config.num_key_value_heads = fields.count("num_key_value_heads").value_or(config.num_attention_heads);
  config.head_dim = fields.count("head_dim").value_or(config.hidden_size / config.num_attention_heads);
  config.vocab_size = fields.required_count("vocab_size");
  config.max_position_embeddings = fields.count("max_position_embeddings").value_or(2048);
  config.rms_norm_eps = fields.positive("rms_norm_eps").value_or(config.rms_norm_eps);
  config.tie_word_embeddings = fields.flag("tie_word_embeddings");
  config.bos_token_ids = fields.token_ids("bos_token_id", config.vocab_size);
  config.eos_token_ids = fields.token_ids("eos_token_id", config.vocab_size);
  require_supported(fields, config);
  read_rope(fields, origin, config);
  if (const auto why = contradiction(config)) throw Error(Errc::corrupt, origin + ": " + *why);
  return config;
}

ModelConfig load_config(const std::filesystem::path& file) {
  return parse_config(read_text_file(file, kMostConfigBytes), file.string());
}

std::vector<double> rope_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(config.head_dim / 2);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / config.head_dim;
    frequencies[i] = std::pow(config.rope_theta, -exponent);
  }
  if (!config.rope_scaling) return frequencies;

  // A pair that turns more than high_freq_factor times within the trained context keeps its frequency, one that
  // turns less than low_freq_factor times is slowed by `factor`; in between, linear in the turns.
  const RopeScaling& s = *config.rope_scaling;
  for (double& frequency : frequencies) {
    const double turns = s.original_max_position_embeddings * frequency / (2.0 * std::numbers::pi);
    const double keep = std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
    frequency *= keep + (1.0 - keep) / s.factor;
  }
  return frequencies;
}

}  // namespace sluice::tools
