#pragma once

#include <cstdint>
#include <vector>

#include "tests/scheduler/policy_step.hpp"

namespace sluice::scheduler::test {

/// Queries that are long in some directions, which are no channels.
inline std::vector<float> lopsided(std::size_t rows, std::uint32_t seed) {
  std::vector<float> q = random_queries(rows, kDim, seed);
  for (std::size_t first = 0; first < q.size(); first += kDim) {
    const float along = 3.f * q[first], across = 2.f * q[first + 1];
    for (std::uint32_t c = 0; c < kDim; ++c) q[first + c] += along + (c % 2 == 0 ? across : -across);
  }
  return q;
}

}  // namespace sluice::scheduler::test
