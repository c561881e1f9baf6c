#pragma once

#include <cstdint>
#include <vector>

#include "sluice/policy.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/layer.hpp"

namespace sluice::tools {

/// |got - want| / |want| (L2), or |got| if `want` is 0. Both [dim].
[[nodiscard]] double relative_error(const float* got, const float* want, std::uint32_t dim);

/// Dense attention against float64 on the first and last query head of every sequence; each policy with a budget of
/// all tokens against dense, and as it is, every sequence of a batch against what it gives alone. To be called before
/// anything is timed.
/// @throws Error{Errc::device} naming what is wrong
void check_attention(const LayerBatch& batch, BenchMachine& machine, const std::vector<PolicySpec>& specs);

}  // namespace sluice::tools
