#pragma once

#include <vector>

#include "sluice/stats.hpp"
#include "tools/cli/report.hpp"

namespace sluice::tools {

/// Wall time around a prompt.
struct FirstTokenTimes {
  double prefill_ms = 0.0;
  double ttft_ms = 0.0;
};

/// Where the time to the first token went: a table of one row.
[[nodiscard]] Table first_token_table(const PromptStats& stats, const FirstTokenTimes& times);

/// Appends what prefill computed: blocks as a share of dense attention's where they were chosen (all, if they never
/// were), and the share of chunks and layers where they were.
void append_blocks(const PromptStats& stats, std::vector<Column>& columns, std::vector<Json>& row);

}  // namespace sluice::tools
