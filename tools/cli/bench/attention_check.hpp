#pragma once

#include <vector>

#include "sluice/policy.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/layer.hpp"

namespace sluice::tools {

/// Dense attention against float64 on the first and last query head of every sequence; each policy with a budget of
/// all tokens against dense, and as it is, every sequence of a batch against what it gives alone. To be called before
/// anything is timed.
/// @throws Error{Errc::device} naming what is wrong
void check_attention(const LayerBatch& batch, BenchMachine& machine, const std::vector<PolicySpec>& specs);

}  // namespace sluice::tools
