#include "tools/cli/prefill_automatic.hpp"

#include <algorithm>

namespace sluice::tools {
namespace {

/// The runtime's rule: after a choice that keeps more than this, so many chunks are dense.
constexpr double kNearlyAll = 0.85;
constexpr std::uint32_t kDenseChunks = 8;

}  // namespace

std::vector<bool> automatic_plan(const PrefillPass& pass, std::uint32_t q_heads, std::uint32_t from) {
  const std::vector<PrefillChoice> choices = pass.choices();
  std::vector<bool> plan;
  std::uint32_t dense_chunks = 0;
  for (std::size_t c = 0; c < pass.chunks(); ++c) {
    plan.push_back(pass.keys(c) >= from && dense_chunks == 0);
    if (!plan.back()) {
      dense_chunks -= std::min(dense_chunks, 1u);
      continue;
    }
    double kept = 0.0, causal = 0.0;
    for (std::size_t i = c * q_heads; i < (c + 1) * q_heads; ++i) {
      kept += static_cast<double>(choices[i].kept);
      causal += static_cast<double>(choices[i].causal);
    }
    if (kept > kNearlyAll * causal) dense_chunks = kDenseChunks;
  }
  return plan;
}

}  // namespace sluice::tools
