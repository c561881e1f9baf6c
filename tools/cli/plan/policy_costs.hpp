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
};

/// Whether two policies choose of the same, by the same estimates and up to the same kind of budget.
[[nodiscard]] bool alike(const PolicySpec& a, const PolicySpec& b) noexcept;

/// The rates with the costs of the first that is alike.
/// @throws as parse_policy
[[nodiscard]] scheduler::LaneRates rates_for(const PolicySpec& policy, std::span<const PolicyCosts> costs,
                                             const scheduler::LaneRates& rates);

/// Costs that forwards of such a policy fit, all of one sequence or all of a batch, beside `rates`, which hold for the
/// default. Where the CPU chooses, that takes what is left of a layer, and there are no others.
[[nodiscard]] scheduler::StageCosts policy_costs(const PolicySpec& policy, std::span<const CaseTimes> cases,
                                                 const scheduler::LaneRates& rates);

/// Of one stage that the default has none of: what is left of the layers that have it.
[[nodiscard]] std::optional<scheduler::StageCost> rest_cost(Stage stage, std::span<const CaseTimes> cases,
                                                            const scheduler::LaneRates& rates);

}  // namespace sluice::tools
