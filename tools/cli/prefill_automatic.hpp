#pragma once

#include <cstdint>
#include <vector>

#include "tools/cli/prefill_layer.hpp"

namespace sluice::tools {

/// The chunks in which the runtime's `auto` would choose blocks, going by a pass that chose them in all: none below the
/// device's crossover `from`, and none for a while after a choice that kept nearly everything.
[[nodiscard]] std::vector<bool> automatic_plan(const PrefillPass& pass, std::uint32_t q_heads, std::uint32_t from);

}  // namespace sluice::tools
