#pragma once

#include <cstdint>

namespace sluice::tools {

/// A share and where it lies with 95% confidence.
struct Interval {
  double low = 0.0;
  double high = 1.0;
};
/// Of `hits` among `trials` that do not depend on each other, by Wilson's score: right for few trials and at 0 and 1,
/// too.
[[nodiscard]] Interval wilson(std::uint64_t hits, std::uint64_t trials);

/// McNemar's exact test: the two-sided p-value of pairs that differ, so many one way and so many the other, if both
/// ways are as likely.
[[nodiscard]] double mcnemar(std::uint64_t one, std::uint64_t other);

}  // namespace sluice::tools
