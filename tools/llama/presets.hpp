#pragma once

#include <string_view>

#include "tools/llama/config.hpp"

namespace sluice::tools {

/// Meta's Llama-3.1-8B: 8.0 billion parameters.
[[nodiscard]] ModelConfig llama_3_1_8b();
/// A toy with every feature of the large one (grouped queries, llama3 RoPE, own head): 1.0 million parameters.
[[nodiscard]] ModelConfig llama_tiny();

/// A configuration by name, for models of random weights: `llama-3.1-8b`, `tiny`.
/// @throws Error{Errc::not_found} that lists the names.
[[nodiscard]] ModelConfig preset_config(std::string_view name);

}  // namespace sluice::tools
