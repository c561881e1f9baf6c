#pragma once

#include <string>
#include <vector>

#include "sluice/policy.hpp"
#include "tools/cli/eval/synthetic.hpp"
#include "tools/cli/eval/tasks.hpp"
#include "tools/cli/plot/plot_files.hpp"
#include "tools/cli/text/report.hpp"

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
  /// @param vocabulary  of the model, if there is one
  EvalReport(const NamedPolicies& policies, const AttentionShape& shape, std::size_t vocabulary = 0);

  /// Every policy's scores after prompts prefilled as `prefill` says. Those without prompts are left out.
  /// With logits, pairs of every policy's answers and dense attention's, too.
  void add(const Cell& cell, const std::string& prefill, const std::vector<TaskScore>& scores);
  /// Every policy's predictions of what came in passages of so many tokens, beside dense attention's.
  void add_passages(std::uint32_t length, const std::string& prefill, const std::vector<TaskScore>& scores);
  void add(const NeedleOptions& options, const std::vector<NeedleScore>& scores, const AttentionShape& shape);

  /// Those that have rows, and who lost answers wherever tasks were tried.
  [[nodiscard]] std::vector<Table> tables() const;
  [[nodiscard]] std::string svg() const { return to_svg(accuracy_plot(to_objects(tasks_))); }

 private:
  void add_lost(const Cell& cell, std::size_t policy, const std::string& prefill, double accuracy,
                const TaskScore& score);

  void add_pairs(const Cell& cell, const std::string& prefill, const std::vector<TaskScore>& scores);

  const NamedPolicies& policies_;
  AttentionShape shape_;
  std::size_t vocabulary_;
  Table tasks_{.key = "eval", .title = kDecodeNote};
  Table lost_{.key = "lost",
              .title =
                  "Who lost the answer, for accuracies below 0.95: the heads that missed most of the mass they "
                  "wanted on the answer's tokens, over the failed prompts"};
  Table pairs_{.key = "pairs",
               .title =
                   "Against dense attention, prompt by prompt; at least: of all prompts, with 95% confidence, the "
                   "share of the same answers; KL: of the next token while both have said the same, nats"};
  Table passages_{.key = "text",
                  .title =
                      "Predictions of what comes next in a text, token by token; x dense: perplexity by that of dense "
                      "attention; KL: from dense attention's prediction, nats; same: tokens where both find the same "
                      "one most likely"};
  Table needles_{.key = "needles",
                 .title =
                     "Needles in synthetic attention, new ones in every step; found: heads and steps that "
                     "attended at least half of the mass on them"};
};

}  // namespace sluice::tools
