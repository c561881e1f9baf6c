#include "tools/cli/eval/agreement.hpp"

#include <algorithm>
#include <cmath>

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

Agreement agreement(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense) {
  const std::size_t count = std::min(outputs.size(), dense.size());
  std::size_t same = 0;
  double tokens = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (outputs[i] == dense[i]) {
      ++same;
      continue;
    }
    const auto apart = std::ranges::mismatch(outputs[i], dense[i]);
    tokens += static_cast<double>(apart.in1 - outputs[i].begin());
  }
  Agreement found;
  if (count != 0) found.same_share = static_cast<double>(same) / static_cast<double>(count);
  if (same != count) found.until_different = tokens / static_cast<double>(count - same);
  return found;
}

}  // namespace sluice::tools
