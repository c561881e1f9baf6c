#pragma once

#include <string>
#include <vector>

#include "sluice/policy.hpp"
#include "tools/cli/eval_synthetic.hpp"
#include "tools/cli/eval_tasks.hpp"
#include "tools/cli/plot.hpp"
#include "tools/cli/report.hpp"
#include "tools/cli/stats_columns.hpp"

namespace sluice::tools {

/// A policy as the user wrote it, for tables.
struct NamedPolicies {
  std::vector<std::string> names;
  std::vector<PolicySpec> specs;
};

/// What `sluice eval` found, as tables and a plot.
class EvalReport {
 public:
  /// `policies` must outlive it.
  EvalReport(const NamedPolicies& policies, const AttentionShape& shape);

  /// Every policy's scores after prompts prefilled as `prefill` says; the plot names that only if there are `several`.
  void add(const Cell& cell, const std::string& prefill, bool several, const std::vector<TaskScore>& scores);
  void add(const NeedleOptions& options, const std::vector<NeedleScore>& scores, const AttentionShape& shape);

  /// Those that have rows.
  [[nodiscard]] std::vector<Table> tables() const;
  [[nodiscard]] std::string svg() const { return to_svg(plot_); }

 private:
  void add_lost(const Cell& cell, std::size_t policy, const std::string& prefill, double accuracy,
                const TaskScore& score);
  /// Of this name, a new one if need be.
  [[nodiscard]] PlotSeries& series(const std::string& name);

  const NamedPolicies& policies_;
  AttentionShape shape_;
  Table tasks_{.key = "eval", .title = kStatsNote};
  Table lost_{.key = "lost",
              .title = "Who lost the answer, for accuracies below 0.95: the heads that missed most of the mass they "
                       "wanted on the answer's tokens, over the failed prompts"};
  Table needles_{.key = "needles",
                 .title = "Needles in synthetic attention, new ones in every step; found: heads and steps that "
                          "attended at least half of the mass on them"};
  Plot plot_;
};

}  // namespace sluice::tools
