#pragma once

#include "sluice/engine_options.hpp"

namespace sluice::runtime {

/// What an engine is built by.
struct ResolvedOptions {
  EngineOptions options;  ///< of sequences that have room of their own the bounds that were given
  EngineSizes sizes;      ///< all of the runtime goes by these
};

/// Of options as they are given. Throws as sluice::resolved.
[[nodiscard]] ResolvedOptions with_policies(const EngineOptions& options);

}  // namespace sluice::runtime
