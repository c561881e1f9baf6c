// config.json: what is accepted is in range, and says the same written down again.

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz.hpp"
#include "tools/llama/config.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

bool is_count(std::uint32_t value) { return value >= 1 && value < (1u << 31); }
bool is_positive(double value) { return std::isfinite(value) && value > 0; }

void check_ids(const std::vector<int>& ids, std::uint32_t vocab_size) {
  for (const int id : ids) FUZZ_REQUIRE(id >= 0 && static_cast<std::uint32_t>(id) < vocab_size);
}

void check(const tools::ModelConfig& config) {
  FUZZ_REQUIRE(is_count(config.hidden_size) && is_count(config.intermediate_size));
  FUZZ_REQUIRE(is_count(config.num_hidden_layers) && is_count(config.vocab_size));
  FUZZ_REQUIRE(is_count(config.num_attention_heads) && is_count(config.num_key_value_heads));
  FUZZ_REQUIRE(config.num_attention_heads % config.num_key_value_heads == 0);
  FUZZ_REQUIRE(is_count(config.head_dim) && config.head_dim % 2 == 0);
  FUZZ_REQUIRE(std::uint64_t{config.num_attention_heads} * config.head_dim < (1u << 30));
  FUZZ_REQUIRE(is_count(config.max_position_embeddings));
  FUZZ_REQUIRE(is_positive(config.rms_norm_eps) && is_positive(config.rope_theta));
  check_ids(config.bos_token_ids, config.vocab_size);
  check_ids(config.eos_token_ids, config.vocab_size);
  if (config.rope_scaling) {
    FUZZ_REQUIRE(is_positive(config.rope_scaling->factor) && config.rope_scaling->factor >= 1);
    FUZZ_REQUIRE(is_positive(config.rope_scaling->low_freq_factor));
    FUZZ_REQUIRE(config.rope_scaling->low_freq_factor < config.rope_scaling->high_freq_factor);
    FUZZ_REQUIRE(std::isfinite(config.rope_scaling->high_freq_factor));
    FUZZ_REQUIRE(is_count(config.rope_scaling->original_max_position_embeddings));
  }
  if (config.head_dim > 4096) return;  // only the time that it takes
  for (const double frequency : tools::rope_frequencies(config)) FUZZ_REQUIRE(std::isfinite(frequency));
}

std::string written(const tools::ModelConfig& config) {
  nlohmann::json json = {{"model_type", "llama"},
                         {"hidden_size", config.hidden_size},
                         {"intermediate_size", config.intermediate_size},
                         {"num_hidden_layers", config.num_hidden_layers},
                         {"num_attention_heads", config.num_attention_heads},
                         {"num_key_value_heads", config.num_key_value_heads},
                         {"head_dim", config.head_dim},
                         {"vocab_size", config.vocab_size},
                         {"max_position_embeddings", config.max_position_embeddings},
                         {"rms_norm_eps", config.rms_norm_eps},
                         {"rope_theta", config.rope_theta},
                         {"tie_word_embeddings", config.tie_word_embeddings},
                         {"bos_token_id", config.bos_token_ids},
                         {"eos_token_id", config.eos_token_ids}};
  if (const auto& scaling = config.rope_scaling) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", scaling->factor},
                            {"low_freq_factor", scaling->low_freq_factor},
                            {"high_freq_factor", scaling->high_freq_factor},
                            {"original_max_position_embeddings", scaling->original_max_position_embeddings}};
  }
  return json.dump();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tools::ModelConfig config;
  if (!accepts([&] { config = tools::parse_config(text_of(data, size), "config.json"); })) return 0;
  check(config);
  const std::string text = written(config);
  FUZZ_REQUIRE(written(tools::parse_config(text, "config.json")) == text);
  return 0;
}
