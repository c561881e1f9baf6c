#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// `--dense-tokens`: EngineOptions::dense_tokens.
void add_dense_tokens(CLI::App& app, std::optional<std::uint32_t>& tokens, const std::string& otherwise);
/// As a report has it: a number, or "auto".
[[nodiscard]] Json dense_tokens_json(std::uint32_t tokens);

}  // namespace sluice::tools
