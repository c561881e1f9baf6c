#pragma once

#include <vector>

#include "sluice/shape.hpp"
#include "sluice/stats.hpp"
#include "tools/cli/report.hpp"

namespace sluice::tools {

/// Appends what a policy cost and kept in its decode steps, as columns and one row's cells: tokens attended and
/// keys scored and estimated per KV head and step, positions that its sources proposed as a share of n per query head,
/// share of dense attention's tokens and bytes (near and far apart), near hits, and coverage. Quantities that were not
/// counted (no step, no audit, no candidates) are null. Those that are 0 because nothing of the kind happened, such as
/// reads of far keys where everything is near, are hidden from a table of pairs.
void append_stats(const Stats& stats, const AttentionShape& shape, std::vector<Column>& columns,
                  std::vector<Json>& row);

/// Whether any token was not near: attended in host memory or fetched from it.
[[nodiscard]] bool offloaded(const Stats& stats) noexcept;

/// What the Markdown titles of these columns leave out.
inline constexpr const char* kStatsNote =
    "attended, scored and (by 4-bit keys) estimated: tokens per KV head and step. candidates: of n, per query head. dense, near and far bytes: of "
    "dense attention's.";

}  // namespace sluice::tools
