#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/progress_bar.hpp"

namespace sluice::tools {

/// Needles in synthetic attention of one layer of Llama-3.1-8B's shape, new ones in every decode step.
struct NeedleOptions {
  std::uint32_t tokens = 131072;
  std::uint32_t needles = 1;  ///< per step
  std::uint32_t steps = 8;
  std::uint64_t seed = 0;
  std::vector<double> sinks = {};  ///< see SyntheticOptions::sinks
  double near = 0.0;               ///< share of the context that device memory has room for
};

/// @throws Error{Errc::invalid_argument} for more needles than the context has room for, or shares that sinks cannot
/// have.
void check(const NeedleOptions& options);

[[nodiscard]] AttentionShape needle_shape();

struct NeedleScore {
  PageLayout layout{};    ///< without head_dim: not finished
  DecodeScore decoded;    ///< every step audited, the needles watched
  double layer_us = 0.0;  ///< median over the steps of a run without audits
};

/// Every policy over the same needles. Two runs each: with an audit of every step, and without for the time.
/// Interrupted, it returns what is finished.
[[nodiscard]] std::vector<NeedleScore> evaluate_needles(const NeedleOptions& options, const EngineFlags& flags,
                                                        const std::vector<PolicySpec>& policies,
                                                        const std::shared_ptr<Device>& device, ProgressBar& bar);

}  // namespace sluice::tools
