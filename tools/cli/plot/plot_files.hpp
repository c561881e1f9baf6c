#pragma once

#include "tools/cli/plot/plot.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// Accuracy against bytes read, a series for each policy, and for each way to prefill if there are several.
/// @param rows  of the table `eval`, see EvalReport
[[nodiscard]] Plot accuracy_plot(const Json& rows);

}  // namespace sluice::tools
