#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice::scheduler {

/// A candidate as top-p sees it: an order-preserving image of its score, and its softmax weight on any scale.
struct Weighed {
  std::uint32_t key = 0;
  float weight = 0.f;
};

/// The largest key such that the candidates from it on hold `share` of the weight: keeping these keeps the fewest, and
/// all ties of the least (arXiv 2502.02770, section 4.2). With share >= 1 the least key. The order of `pool` does not
/// matter, up to the rounding of sums in float64; it is reordered and shortened.
/// @param pool  not empty
[[nodiscard]] std::uint32_t top_p_cut(std::vector<Weighed>& pool, double share);

}  // namespace sluice::scheduler
