#pragma once

#include "sluice/engine_options.hpp"

namespace sluice::runtime {

/// As sluice::resolved.
[[nodiscard]] EngineOptions with_policies(const EngineOptions& options);

/// Of an engine with such options. All of the runtime goes by these.
[[nodiscard]] EngineSizes sizes_of(const EngineOptions& options) noexcept;

}  // namespace sluice::runtime
