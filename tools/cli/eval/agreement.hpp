#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice::tools {

/// A share and where it lies with 95% confidence.
struct Interval {
  double low = 0.0;
  double high = 1.0;
};
/// Of `hits` among `trials` that do not depend on each other, by Wilson's score: right for few trials and at 0 and 1,
/// too.
[[nodiscard]] Interval wilson(std::uint64_t hits, std::uint64_t trials);

/// How far greedy outputs are those of dense attention.
struct Agreement {
  double same_share = 0.0;                ///< of the outputs, that are the same from beginning to end
  std::optional<double> until_different;  ///< of the others, tokens before the first that differs: the mean
};
/// `dense`: for the same prompts in the same order.
[[nodiscard]] Agreement agreement(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense);

}  // namespace sluice::tools
