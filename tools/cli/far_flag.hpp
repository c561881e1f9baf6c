#pragma once

#include <functional>
#include <string>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/forward.hpp"
#include "sluice/tensor.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// `--far`: a budget of far tokens that is written behind policies, see FarOptions.
void add_far(CLI::App& app, std::string& far);

/// What the budget is for that `--far auto` advises.
struct FarPlace {
  AttentionShape shape;
  DType kv_dtype = DType::bf16;
  PlacementMode placement = PlacementMode::hybrid;
  std::uint32_t page_tokens = 16;
  std::uint32_t rows = 1;    ///< sequences of a forward
  std::uint32_t tokens = 1;  ///< of each
  double near_hits = 0.5;    ///< of the tokens that are chosen, those that lie near when they are wanted
};

/// Where device memory has room for this share of the tokens, the share of those that are attended that a budget of far
/// tokens is advised for: half, whatever the policy, so that attention with less of a pattern has a budget, too.
[[nodiscard]] double usual_near_hits(double near_share) noexcept;

/// The policy with the budget that `far` says behind it: `sluice | far=2048`. As it is if `far` is empty, or advises
/// none. `rates` is called for `auto` alone.
/// @throws Error{Errc::invalid_argument} if the policy takes no such budget
[[nodiscard]] std::string with_far(const std::string& policy, const std::string& far, const FarPlace& place,
                                   const std::function<scheduler::LaneRates()>& rates);

/// Tokens of a layer that a policy's budget allows at this length; null if it has none.
[[nodiscard]] Json far_budget(const PolicySpec& policy, const AttentionShape& shape, std::uint32_t tokens);

}  // namespace sluice::tools
