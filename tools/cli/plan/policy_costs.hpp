#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/policy.hpp"
#include "tools/cli/plan/case_times.hpp"

namespace sluice::tools {

/// What stages take in forwards whose policy chooses as `policy` does: by the same kernels, or the same threads of the
/// CPU. Stages that are not here take what they take for the default.
struct PolicyCosts {
  std::string policy;
  scheduler::StageCosts stages{};
  scheduler::StageCosts batch{};  ///< see LaneRates::batch; of what has none, a batch takes what its bytes take
  double scored = 0.0;            ///< see CaseTimes::scored_share, of the longest sequence
};

/// Whether two policies choose of the same, by the same estimates and up to the same kind of budget.
[[nodiscard]] bool alike(const PolicySpec& a, const PolicySpec& b) noexcept;

/// The first that is; null if none is.
/// @throws as parse_policy
[[nodiscard]] const PolicyCosts* like(const PolicySpec& policy, std::span<const PolicyCosts> costs);

/// The rates with its costs.
/// @throws as parse_policy
[[nodiscard]] scheduler::LaneRates rates_for(const PolicySpec& policy, std::span<const PolicyCosts> costs,
                                             const scheduler::LaneRates& rates);

/// What was timed of a policy.
struct PolicyCases {
  std::string policy;
  std::vector<CaseTimes> alone{}, together{};  ///< one sequence, and a batch, placed hybrid
  std::vector<CaseTimes> streamed{};           ///< one sequence, placed stream
};

/// The costs that they fit beside `rates`, which hold for the default. Where the CPU chooses, that is told from the
/// cases that stream, in which it attends nothing, if there are any.
[[nodiscard]] PolicyCosts policy_costs(const PolicyCases& cases, const scheduler::LaneRates& rates);

/// Of `fetch`, which the default has none of: what is left of layers that stream.
[[nodiscard]] std::optional<scheduler::StageCost> fetch_cost(std::span<const CaseTimes> streamed,
                                                             const scheduler::LaneRates& rates);

}  // namespace sluice::tools
