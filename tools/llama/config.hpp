#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/shape.hpp"

namespace sluice::tools {

/// Llama 3.1's stretching of RoPE frequencies (`"rope_type": "llama3"`).
struct RopeScaling {
  double factor = 8.0;            ///< wavelengths beyond the trained context become this much longer. [1, inf)
  double low_freq_factor = 1.0;   ///< wavelengths above original / low_freq_factor are stretched in full
  double high_freq_factor = 4.0;  ///< wavelengths below original / high_freq_factor are left alone; > low_freq_factor
  std::uint32_t original_max_position_embeddings = 8192;
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

/// What config.json of a Hugging Face Llama says, checked. Names are the file's own.
struct ModelConfig {
  std::uint32_t hidden_size = 0;
  std::uint32_t intermediate_size = 0;
  std::uint32_t num_hidden_layers = 0;
  std::uint32_t num_attention_heads = 0;
  std::uint32_t num_key_value_heads = 0;  ///< default: num_attention_heads
  std::uint32_t head_dim = 0;             ///< default: hidden_size / num_attention_heads; even
  std::uint32_t vocab_size = 0;
  std::uint32_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10'000.0;
  std::optional<RopeScaling> rope_scaling;
  bool tie_word_embeddings = false;
  std::vector<int> bos_token_ids;  ///< the file may hold none, one or a list
  std::vector<int> eos_token_ids;

  [[nodiscard]] AttentionShape shape() const noexcept {
    return {.layers = num_hidden_layers,
            .q_heads = num_attention_heads,
            .kv_heads = num_key_value_heads,
            .head_dim = head_dim};
  }
  [[nodiscard]] bool is_eos(int token) const noexcept;
};

/// Numbers in the ranges of real models, heads that divide, and so on; before anything is sized by them.
/// @throws Error{Errc::invalid_argument} naming the field.
void validate(const ModelConfig& config);

/// `model_type` must be `llama`, or `mistral`, which is the same without a sliding window.
/// @param origin  file name for messages
/// @throws Error{Errc::corrupt} naming the field for malformed JSON, missing, contradicting or impossible fields;
///         Error{Errc::unsupported} naming key and value for what this host would compute wrongly (another model_type,
///         biases, quantisation, a sliding window, other activations or RoPE types).
[[nodiscard]] ModelConfig parse_config(std::string_view json, const std::string& origin);

/// @throws Error{Errc::not_found} or Error{Errc::io} if the file cannot be read; else as parse_config.
[[nodiscard]] ModelConfig load_config(const std::filesystem::path& file);

/// Angular frequency of each rotated pair, in radians per position: theta^(-2i/head_dim), stretched by
/// `rope_scaling`.  @return [head_dim / 2]
[[nodiscard]] std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace sluice::tools
