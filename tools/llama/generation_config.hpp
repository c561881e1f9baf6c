#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::tools {

/// What generation_config.json says of sampling. What it does not say, or does not use because `do_sample` is false, is
/// empty: the caller's own default holds.
struct GenerationConfig {
  std::vector<int> eos_token_ids = {};  ///< where given, they count instead of config.json's
  std::optional<float> temperature = {};
  std::optional<float> top_p = {};
  std::optional<std::uint32_t> top_k = {};  ///< 0: all tokens
  std::vector<std::string> ignored = {};    ///< keys that ask for what Sampler lacks, such as repetition_penalty
  friend bool operator==(const GenerationConfig&, const GenerationConfig&) = default;
};

/// @param origin  file name for messages
/// @throws Error{Errc::corrupt} naming the field for malformed JSON and values out of range.
[[nodiscard]] GenerationConfig parse_generation_config(std::string_view json, const std::string& origin,
                                                       std::uint32_t vocab_size);

/// Empty if there is no such file.  @throws Error{Errc::io} if it cannot be read; else as parse_generation_config.
[[nodiscard]] GenerationConfig load_generation_config(const std::filesystem::path& file, std::uint32_t vocab_size);

}  // namespace sluice::tools
