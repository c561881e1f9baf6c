#pragma once

#include <cstdint>
#include <string>

#include "sluice/shape.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {

/// Of the shapes that are known, a comma list.
[[nodiscard]] std::string shape_names();
/// `--q-heads`, `--kv-heads` and `--head-dim`; what is not given stays 0, for the named shape's own.
void add_shape_flags(CLI::App& app, AttentionShape& shape);
/// The attention shape of a known model, with one layer.
/// @throws Error{Errc::invalid_argument} that lists the names.
[[nodiscard]] AttentionShape named_shape(const std::string& name);
/// The same with what add_shape_flags has read.
/// @throws Error{Errc::invalid_argument} as validate, too
[[nodiscard]] AttentionShape named_shape(const std::string& name, const AttentionShape& flags);
/// The same with all layers of the model.
[[nodiscard]] AttentionShape model_shape(const std::string& name);
/// Bytes of the model's weights, in bf16, that a token reads: all but the embedding, of which it reads a row. Of as
/// many layers.
[[nodiscard]] std::uint64_t weights_read(const std::string& name, std::uint32_t layers);

}  // namespace sluice::tools
