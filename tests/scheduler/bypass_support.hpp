#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "scheduler/policy/bypass.hpp"
#include "sluice/step/partial.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

/// Keys that make heads look at their sinks, or elsewhere, and whether these are bypassed then.
namespace sluice::scheduler::test {

inline constexpr std::uint32_t kDim = 16;
inline constexpr std::uint32_t kSinks = 4;
inline constexpr std::uint32_t kLocal = 5;

/// Makes keys [begin, end) answer q with this logit.
inline void aim(FakeKv& kv, const float* q, std::uint32_t begin, std::uint32_t end, double logit) {
  double square = 0.0;
  for (std::uint32_t c = 0; c < kDim; ++c) square += static_cast<double>(q[c]) * q[c];
  for (std::uint32_t t = begin; t < end; ++t) {
    for (std::uint32_t c = 0; c < kDim; ++c) {
      kv.k[t * kDim + c] = static_cast<float>(q[c] * logit * std::sqrt(static_cast<double>(kDim)) / square);
    }
  }
}

/// Makes every sink key answer q with this logit.
inline void aim_sinks(FakeKv& kv, const float* q, double logit) { aim(kv, q, 0, kSinks, logit); }

inline Bypass tested(SinkBypass& bypass, FakeKv& kv, const std::vector<float>& q, std::uint32_t n,
                     const FakeNear& near) {
  Bypass out;
  SelectCounters counters;
  const std::uint32_t heads =
      bypass.test({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &kv}, out, counters);
  REQUIRE(heads == out.heads);
  return out;
}

}  // namespace sluice::scheduler::test
