#include "tools/llama/config.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "sluice/error.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

/// Fields of one JSON object, with messages that name file and field. A null counts as absent, as in
/// Python's configs.
class Fields {
 public:
  Fields(const json& object, std::string origin) : object_(object), origin_(std::move(origin)) {
    if (!object_.is_object()) throw Error(Errc::corrupt, origin_ + ": must be a JSON object");
  }

  [[nodiscard]] const json* find(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  /// An integer in [1, 2^31).
  [[nodiscard]] std::optional<std::uint32_t> count(const char* name) const {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_unsigned() || value->get<std::uint64_t>() < 1 ||
        value->get<std::uint64_t>() >= (1ull << 31)) {
      fail(name, "must be a positive integer below 2^31, is " + value->dump());
    }
    return value->get<std::uint32_t>();
  }
  [[nodiscard]] std::uint32_t required_count(const char* name) const {
    const auto value = count(name);
    if (!value) fail(name, "is missing; is this the config.json of a Llama?");
    return *value;
  }

  /// A finite number above 0.
  [[nodiscard]] std::optional<double> positive(const char* name) const {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() <= 0) {
      fail(name, "must be a positive number, is " + value->dump());
    }
    return value->get<double>();
  }
  [[nodiscard]] double required_positive(const char* name) const {
    const auto value = positive(name);
    if (!value) fail(name, "is missing");
    return *value;
  }

  [[nodiscard]] bool flag(const char* name) const {
    const json* value = find(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) fail(name, "must be true or false, is " + value->dump());
    return value->get<bool>();
  }

  [[nodiscard]] std::optional<std::string> text(const char* name) const {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) fail(name, "must be a string, is " + value->dump());
    return value->get<std::string>();
  }

  /// None, one id or a list of ids.
  [[nodiscard]] std::vector<int> token_ids(const char* name, std::uint32_t vocab_size) const {
    const json* value = find(name);
    if (value == nullptr) return {};
    std::vector<int> ids;
    for (const json& id : value->is_array() ? *value : json::array({*value})) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= vocab_size) {
        fail(name, "must hold ids below vocab_size " + std::to_string(vocab_size) + ", has " + id.dump());
      }
      ids.push_back(id.get<int>());
    }
    return ids;
  }

  [[noreturn]] void fail(const char* name, const std::string& why, Errc code = Errc::corrupt) const {
    throw Error(code, origin_ + ": '" + name + "' " + why);
  }

 private:
  const json& object_;
  std::string origin_;
};

/// Refuses what would silently compute something else.
void require_supported(const Fields& fields) {
  if (const auto type = fields.text("model_type"); type && *type != "llama") {
    fields.fail("model_type", "is '" + *type + "'; this host runs 'llama' only", Errc::unsupported);
  }
  if (const auto act = fields.text("hidden_act"); act && *act != "silu") {
    fields.fail("hidden_act", "is '" + *act + "'; this host has 'silu' only", Errc::unsupported);
  }
  for (const char* bias : {"attention_bias", "mlp_bias"}) {
    if (fields.flag(bias)) fields.fail(bias, "is true; this host has no biases", Errc::unsupported);
  }
}

/// `object` is rope_scaling, or rope_parameters in newer files.
std::optional<RopeScaling> read_rope_scaling(const Fields& object) {
  auto type = object.text("rope_type");
  if (!type) type = object.text("type");  // the key's older name
  if (!type || *type == "default") return std::nullopt;
  if (*type != "llama3") {
    object.fail("rope_type", "is '" + *type + "'; this host has 'llama3' and 'default'", Errc::unsupported);
  }
  const RopeScaling scaling{
      .factor = object.required_positive("factor"),
      .low_freq_factor = object.required_positive("low_freq_factor"),
      .high_freq_factor = object.required_positive("high_freq_factor"),
      .original_max_position_embeddings = object.required_count("original_max_position_embeddings")};
  if (scaling.factor < 1) object.fail("factor", "must be at least 1");
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    object.fail("high_freq_factor", "must be larger than low_freq_factor");
  }
  return scaling;
}

void read_rope(const Fields& fields, const std::string& origin, ModelConfig& config) {
  if (const auto theta = fields.positive("rope_theta")) config.rope_theta = *theta;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json* object = fields.find(name);
    if (object == nullptr) continue;
    const Fields rope(*object, origin + ": '" + name + "'");
    if (const auto theta = rope.positive("rope_theta")) config.rope_theta = *theta;
    config.rope_scaling = read_rope_scaling(rope);
    return;
  }
}

void check_heads(const Fields& fields, const ModelConfig& config) {
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    fields.fail("num_attention_heads", "must be a multiple of num_key_value_heads");
  }
  if (config.head_dim == 0 || config.head_dim % 2 != 0) {
    fields.fail("head_dim", "must be even: RoPE rotates pairs");
  }
  if (std::uint64_t{config.num_attention_heads} * config.head_dim >= (1ull << 30)) {
    fields.fail("num_attention_heads", "times head_dim must be below 2^30");
  }
  if (config.intermediate_size >= (1u << 30)) fields.fail("intermediate_size", "must be below 2^30");
}

}  // namespace

bool ModelConfig::is_eos(int token) const noexcept {
  return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
}

ModelConfig parse_config(std::string_view text, const std::string& origin) {
  json document;
  try {
    document = json::parse(text);
  } catch (const json::exception& e) {
    throw Error(Errc::corrupt, origin + ": not JSON: " + e.what());
  }
  const Fields fields(document, origin);
  require_supported(fields);

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
  read_rope(fields, origin, config);
  check_heads(fields, config);
  return config;
}

ModelConfig load_config(const std::filesystem::path& file) { return parse_config(read_text_file(file), file.string()); }

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
