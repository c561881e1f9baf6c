#pragma once

#include <cstdint>

#include "sluice/page.hpp"
#include "sluice/plan.hpp"
#include "sluice/selection.hpp"

namespace sluice::scheduler {

/// A selection split by who attends it. The two rows are disjoint and their union is the selection.
struct Placement {
  SelectionRow far;    ///< attended by the CPU in place
  SelectionRow fetch;  ///< its pages are copied to the device first
};

/// Splits one KV head's selection. Pure; any split gives the same attention.
/// hybrid and near: all far. stream: all fetched. automatic: pages go to the link, densest first, as long as
/// that lowers the larger of the two lanes' predicted times. At most `max_fetch_pages` are fetched.
/// @param busy_heads  KV heads that share both lanes in this step; scales the rates down
void place(const SelectionRow& selection, std::uint32_t group, const PageLayout& layout, PlacementMode mode,
           const CostRates& rates, std::uint32_t busy_heads, std::uint32_t max_fetch_pages, Placement& out);

}  // namespace sluice::scheduler
