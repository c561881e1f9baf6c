#pragma once

#include <cstdint>

namespace sluice {

/// Two vectors that stand for a page's keys in page scoring.
enum class DigestKind : std::uint8_t {
  box,          ///< elementwise max and min (Quest): its score bounds every q.k of the page from above
  cuboid_mean,  ///< centre +- mean absolute deviation (ArkVale eq. 4): sharper, not a bound
};

/// What `progressive` takes for the mass of a page that it has not seen yet. The paper's minimum is safe only if pages
/// come in their true order, which no digest guarantees.
enum class ProgressRule : std::uint8_t {
  least,      ///< the least that any page had so far (the paper's)
  mean,       ///< the mean of the last microbatch
  median,     ///< the median of the last microbatch; of two in the middle the larger
  certified,  ///< the least, and no more than a bound of what is left may pass 1 - mass: page_tokens * exp(box bound)
};

}  // namespace sluice
