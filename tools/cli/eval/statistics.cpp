#include "tools/cli/eval/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sluice::tools {

Interval wilson(std::uint64_t hits, std::uint64_t trials) {
  if (trials == 0) return {};
  constexpr double kZ = 1.959964;  // Of the normal distribution, for 95% in the middle.
  const auto n = static_cast<double>(trials);
  const double share = static_cast<double>(hits) / n;
  const double middle = (share + kZ * kZ / (2.0 * n)) / (1.0 + kZ * kZ / n);
  const double half = kZ / (1.0 + kZ * kZ / n) * std::sqrt(share * (1.0 - share) / n + kZ * kZ / (4.0 * n * n));
  return {.low = hits == 0 ? 0.0 : middle - half, .high = hits == trials ? 1.0 : middle + half};
}

double mcnemar(std::uint64_t one, std::uint64_t other) {
  const auto n = static_cast<double>(one + other);
  double tail = 0.0;
  for (std::uint64_t k = 0; k <= std::min(one, other); ++k) {
    const auto x = static_cast<double>(k);
    const double ways = std::lgamma(n + 1.0) - std::lgamma(x + 1.0) - std::lgamma(n - x + 1.0);
    tail += std::exp(ways - n * std::numbers::ln2);
  }
  return std::min(1.0, 2.0 * tail);
}

}  // namespace sluice::tools
