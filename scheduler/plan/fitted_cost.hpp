#pragma once

#include <optional>
#include <span>

#include "scheduler/plan/cost_model.hpp"

namespace sluice::scheduler {

/// What a stage took for so many bytes.
struct CostSample {
  double us = 0.0;
  double bytes = 0.0;
};

/// The largest StageCost::share: where time does not grow with the bytes, they cost next to nothing.
inline constexpr double kMostCostShare = 1000.0;

/// The cost of a stage on a lane of `gbps` that comes nearest to what was measured: least squares of relative errors,
/// neither part negative. Samples of one size tell no rate: their bytes are taken to move at the lane's, or slower if
/// that alone would take longer. Nothing, if there are none of a time above 0.
[[nodiscard]] std::optional<StageCost> fitted_cost(std::span<const CostSample> samples, double gbps);

}  // namespace sluice::scheduler
