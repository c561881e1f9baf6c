#pragma once

#include <string>

#include "sluice/shape.hpp"

namespace sluice::tools {

/// Attention shapes of known models, with one layer.
[[nodiscard]] std::string shape_names();
/// @throws Error{Errc::invalid_argument} that lists the names.
[[nodiscard]] AttentionShape named_shape(const std::string& name);

}  // namespace sluice::tools
