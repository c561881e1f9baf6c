#pragma once

#include "scheduler/plan/cost_model.hpp"
#include "scheduler/plan/forward_work.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/forward.hpp"

namespace sluice::scheduler {

/// Far tokens that each query head keeps whatever is hidden: fewer are a matter of accuracy, not of time. What top_k
/// keeps at least unless it says otherwise.
inline constexpr std::uint32_t kLeastAdvised = 64;

/// The budget of far tokens with which, by the plan of a forward of `rows` such rows and the machine's rates, the CPU
/// has attended its part of a layer when the device has attended what lies near; but kLeastAdvised per query head, or a
/// page where pages are attended whole, at least. All, if the row chooses no more by itself. Over the link nothing is
/// hidden: the device fetches when it has done the rest. Whoever begins a sequence may put it into a policy; an engine
/// knows no rates, so that what it selects does not depend on them.
/// @param row   of a policy without such a budget, see forward_row; of it the list is not read
/// @param near  of the tokens that are chosen, the share that lies near when they are wanted; sinks and recent ones do
[[nodiscard]] FarOptions advised_far(const LaneRates& rates, const WorkPlace& place, const ForwardRow& row,
                                     std::uint32_t rows, double near);

}  // namespace sluice::scheduler
