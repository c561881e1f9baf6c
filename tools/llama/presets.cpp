#include "tools/llama/presets.hpp"

#include <string>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

struct Preset {
  std::string_view name;
  ModelConfig (*make)();
};
constexpr Preset kPresets[] = {{"llama-3.1-8b", llama_3_1_8b}, {"tiny", llama_tiny}};

}  // namespace

ModelConfig llama_3_1_8b() {
  return {.hidden_size = 4096,
          .intermediate_size = 14336,
          .num_hidden_layers = 32,
          .num_attention_heads = 32,
          .num_key_value_heads = 8,
          .head_dim = 128,
          .vocab_size = 128256,
          .max_position_embeddings = 1 << 20,  // The model's own is 131,072; random weights were not trained for any.
          .rms_norm_eps = 1e-5,
          .rope_theta = 500'000.0,
          .rope_scaling = RopeScaling{},
          .tie_word_embeddings = false,
          .bos_token_ids = {128000},
          .eos_token_ids = {128001, 128008, 128009}};
}

ModelConfig llama_tiny() {
  return {.hidden_size = 192,
          .intermediate_size = 512,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 64,
          .vocab_size = 320,
          .max_position_embeddings = 32768,
          .rms_norm_eps = 1e-5,
          .rope_theta = 500'000.0,
          .rope_scaling = RopeScaling{},
          .tie_word_embeddings = false,
          .bos_token_ids = {256},
          .eos_token_ids = {257}};
}

ModelConfig preset_config(std::string_view name) {
  std::string known;
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return preset.make();
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw Error(Errc::not_found, "no model shape is called '" + std::string(name) + "'; choose one of: " + known);
}

}  // namespace sluice::tools
