#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "sluice/step/sample.hpp"

/// How many tokens a query head draws by its error bar, in float64: see sample.hpp.
namespace sluice::test {

struct DrawLevel {
  std::uint32_t drawn = 0;  ///< all that there are: none is left
  bool close = false;       ///< float32 may find another number
};

/// Scores that are no numbers are the least.
inline std::vector<double> in_order(std::span<const double> scores) {
  std::vector<double> order;
  for (const double score : scores) order.push_back(std::isnan(score) ? -INFINITY : score);
  std::ranges::sort(order, std::greater<>());
  return order;
}

/// @param estimates  of the tokens that may be drawn, more than `least` + 1
/// @param scores     the same, perturbed
/// @param window     the sum of the weights of those that are attended anyway
inline DrawLevel level_of(std::span<const double> estimates, std::span<const double> scores, double window,
                          std::uint32_t least, std::uint32_t most, double error) {
  constexpr double kCloseScore = 5e-4, kCloseShare = 2e-3;
  const auto tokens = static_cast<std::uint32_t>(scores.size());
  const std::vector<double> order = in_order(scores);
  if (order[least] == -INFINITY || most <= least) return {.drawn = least};
  const bool all = most + 1 >= tokens;
  most = std::min(most, tokens - 1);
  const std::uint32_t last = all ? tokens : most;
  const double threshold = all ? -INFINITY : order[most];
  const auto chance = [](double above) { return -std::expm1(-std::exp(above)); };
  const auto sum_over = [&](const auto& of) {
    double sum = 0.0;
    for (std::uint32_t i = 0; i < tokens; ++i) {
      if (std::isnan(scores[i]) || !(scores[i] > threshold)) continue;
      sum += of(estimates[i]) / (threshold == -INFINITY ? 1.0 : chance(estimates[i] - threshold));
    }
    return sum;
  };
  const double sum = window + sum_over([](double e) { return std::exp(e); });
  DrawLevel level{.drawn = least, .close = !all && order[most - 1] - order[most] < kCloseScore};
  for (; level.drawn < last; level.drawn = level.drawn == most ? last : more_draws(level.drawn, most)) {
    if (level.drawn == most) continue;
    const double enough = std::log(error * sum / std::sqrt(double{1} * level.drawn));
    const double count = sum_over([&](double e) { return chance(e - enough); });
    level.close |= std::abs(count / level.drawn - 1.0) < kCloseShare;
    if (count <= level.drawn) return level;
  }
  return level;
}

}  // namespace sluice::test
