#pragma once

#include <cstdint>
#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tools/cli/bench/prefill_layer.hpp"

namespace sluice::tools {

/// Of a model whose layers are all like this one: the share of them that chooses blocks under PrefillMode::automatic,
/// chunk by chunk. `pass` has chosen in every chunk.
[[nodiscard]] std::vector<double> automatic_shares(const PrefillPass& pass, std::uint32_t q_heads, std::uint32_t layers,
                                                   const PrefillCosts& costs);

}  // namespace sluice::tools
