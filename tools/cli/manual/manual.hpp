#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice::tools {

/// What the command knows of itself, in the forms that shells and `man` read: made of the same declarations as `--help`,
/// so that nothing can be forgotten.
[[nodiscard]] std::string man_page(const CLI::App& app, const std::string& version);
/// For bash; zsh reads it after bashcompinit.
[[nodiscard]] std::string bash_completion(const CLI::App& app);
[[nodiscard]] std::string zsh_completion(const CLI::App& app);
[[nodiscard]] std::string fish_completion(const CLI::App& app);

}  // namespace sluice::tools
