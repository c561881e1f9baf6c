#pragma once

#include <string>
#include <vector>

#include "tools/cli/text/command.hpp"
#include "tools/llama/config.hpp"

namespace sluice::tools {

/// Where a prompt comes from; exactly one is given.
struct PromptFlags {
  std::string text;
  std::string file;    ///< "-": standard input
  std::string tokens;  ///< file of token ids; "-": standard input
};

void add_prompt_flags(CLI::App& app, PromptFlags& flags);

/// The prompt as token ids.
/// @throws Error{Errc::invalid_argument} if it is empty, not UTF-8, or text for a model that does not read bytes;
///         Error{Errc::not_found}, Error{Errc::io} for its file.
[[nodiscard]] std::vector<int> read_prompt(const PromptFlags& flags, const ModelConfig& model);

}  // namespace sluice::tools
