#pragma once

#include <string>

#include "sluice/shape.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {

/// Attention shapes of known models, with one layer.
[[nodiscard]] std::string shape_names();
/// `--q-heads`, `--kv-heads` and `--head-dim`; what is not given stays 0, for the named shape's own.
void add_shape_flags(CLI::App& app, AttentionShape& shape);
/// @throws Error{Errc::invalid_argument} that lists the names.
[[nodiscard]] AttentionShape named_shape(const std::string& name);
/// The same with all layers of the model.
[[nodiscard]] AttentionShape model_shape(const std::string& name);

}  // namespace sluice::tools
