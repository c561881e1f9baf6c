#pragma once

#include <memory>
#include <string>

#include "sluice/device.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

/// The model that the flags name: a directory, or a known shape with random weights.
/// @throws Error{Errc::invalid_argument} unless exactly one of `directory` and `random_weights` is given; else as
/// Model.
[[nodiscard]] Model load_model(const std::string& directory, const std::string& random_weights, std::uint32_t threads,
                               std::shared_ptr<Device> device);

}  // namespace sluice::tools
