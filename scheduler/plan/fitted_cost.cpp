#include "scheduler/plan/fitted_cost.hpp"

#include <algorithm>
#include <cmath>

namespace sluice::scheduler {
namespace {

/// Sums over samples, each weighted by the inverse square of its time.
struct Sums {
  double weight = 0.0, x = 0.0, y = 0.0, xx = 0.0, xy = 0.0;
  double least = INFINITY, most = 0.0;  ///< bytes

  void add(const CostSample& sample) noexcept {
    const double w = 1.0 / (sample.us * sample.us);
    weight += w;
    x += w * sample.bytes;
    y += w * sample.us;
    xx += w * sample.bytes * sample.bytes;
    xy += w * sample.bytes * sample.us;
    least = std::min(least, sample.bytes);
    most = std::max(most, sample.bytes);
  }
};

}  // namespace

std::optional<StageCost> fitted_cost(std::span<const CostSample> samples, double gbps) {
  Sums sums;
  for (const CostSample& sample : samples) {
    if (sample.us > 0.0) sums.add(sample);
  }
  if (sums.weight == 0.0) return std::nullopt;
  const double lane = 1.0 / (gbps * kBytesPerUs);  // Microseconds per byte.
  const double mean_us = sums.y / sums.weight;
  double fixed = 0.0, slope = lane;
  constexpr double kApart = 1.05;
  if (sums.most > kApart * sums.least) {
    const double spread = sums.weight * sums.xx - sums.x * sums.x;
    slope = (sums.weight * sums.xy - sums.x * sums.y) / spread;
    fixed = (sums.y - slope * sums.x) / sums.weight;
    if (fixed < 0.0) {
      fixed = 0.0;
      slope = sums.xy / sums.xx;
    }
    if (slope <= 0.0) {
      slope = 0.0;
      fixed = mean_us;
    }
  } else {
    const double bytes = sums.x / sums.weight;
    fixed = std::max(0.0, mean_us - bytes * lane);
    if (fixed == 0.0) slope = mean_us / bytes;
  }
  return StageCost{.fixed_us = fixed,
                   .share = slope * kMostCostShare <= lane ? kMostCostShare : std::min(kMostCostShare, lane / slope)};
}

}  // namespace sluice::scheduler
