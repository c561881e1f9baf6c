#include "tools/cli/eval/report.hpp"

#include <algorithm>
#include <cmath>

#include "tools/cli/engine_columns.hpp"
#include "tools/cli/eval/agreement.hpp"

namespace sluice::tools {
namespace {

/// Share of heads and steps whose coverage reached the mass that the policy aims at; null if it aims at none.
Json reached(const PolicySpec& spec, const ShareHistogram& coverage) {
  const BudgetKind kind = spec.budget.kind;
  const bool counts = kind == BudgetKind::top_k || kind == BudgetKind::sampled || kind == BudgetKind::verified ||
                      kind == BudgetKind::within || kind == BudgetKind::drawn;
  const bool aims = spec.sources != 0 && !spec.uses(Source::all) && !counts;
  return aims && coverage.count() != 0 ? Json(coverage.share_above(spec.budget.mass)) : Json();
}

void append_reached(const PolicySpec& spec, const ShareHistogram& coverage, std::vector<Column>& columns,
                    std::vector<Json>& row) {
  columns.push_back({"reached_share", "reached", 1, Column::Show::percent});
  row.push_back(reached(spec, coverage));
}

/// Of dense attention, if it is among the policies; else null.
const TaskScore* dense_score(const NamedPolicies& policies, const std::vector<TaskScore>& scores) {
  for (std::size_t p = 0; p < scores.size(); ++p) {
    if (policies.specs[p].uses(Source::all)) return &scores[p];
  }
  return nullptr;
}

std::span<const std::vector<int>> dense_outputs(const NamedPolicies& policies, const std::vector<TaskScore>& scores) {
  const TaskScore* const dense = dense_score(policies, scores);
  return dense == nullptr ? std::span<const std::vector<int>>() : dense->outputs;
}

void append_answers(const TaskScore& score, std::span<const std::vector<int>> dense, std::vector<Column>& columns,
                    std::vector<Json>& row) {
  const Interval interval = wilson(score.solved, score.prompts);
  const Agreement found = agreement(score.outputs, dense);
  std::size_t tokens = 0;
  for (const std::vector<int>& output : score.outputs) tokens += output.size();
  const auto add = [&](Column column, Json value) {
    columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  add({"accuracy_low", "95% from", 2}, interval.low);
  add({"accuracy_high", "to", 2}, interval.high);
  add({"answer_tokens", "said", 1}, static_cast<double>(tokens) / score.prompts);
  add({"same_as_dense_share", "as dense", 2}, dense.empty() ? Json() : Json(found.same_share));
  add({"tokens_until_different", "until other", 1},
      dense.empty() || !found.until_different ? Json() : Json(*found.until_different));
}

}  // namespace

EvalReport::EvalReport(const NamedPolicies& policies, const AttentionShape& shape, std::size_t vocabulary)
    : policies_(policies), shape_(shape), vocabulary_(vocabulary) {
  lost_.columns = {{"task", "task"},         {"length_tokens", "length"}, {"policy", "policy"},
                   {"prefill", "prefill"},   {"accuracy", "accuracy", 2}, {"layer", "layer"},
                   {"head", "head"},         {"wanted_steps", "steps"},   {"wanted_mass", "wanted", 3},
                   {"kept_share", "kept", 3}};
}

void EvalReport::add(const Cell& cell, const std::string& prefill, const std::vector<TaskScore>& scores) {
  for (std::size_t p = 0; p < scores.size(); ++p) {
    const TaskScore& score = scores[p];
    if (score.prompts == 0) continue;
    const std::string& name = policies_.names[p];
    const double accuracy = static_cast<double>(score.solved) / score.prompts;
    std::vector<Column> columns = {{"task", "task"},           {"length_tokens", "length"}, {"policy", "policy"},
                                   {"prefill", "prefill"},     {"page_tokens", "page"},     {"prompts", "prompts"},
                                   {"accuracy", "accuracy", 2}};
    std::vector<Json> row = {to_string(cell.kind),     cell.length,   name,    prefill,
                             score.layout.page_tokens, score.prompts, accuracy};
    append_answers(score, dense_outputs(policies_, scores), columns, row);
    append_blocks(score.prompt, columns, row);
    columns.push_back({"prefill_ms", "prefill ms", 1});
    row.push_back(1e3 * score.prefill_s / score.prompts);
    append_decode(score.decoded, shape_, score.layout, columns, row);
    append_reached(policies_.specs[p], score.decoded.audited.coverage, columns, row);
    tasks_.columns = std::move(columns);
    tasks_.rows.push_back(std::move(row));
    add_lost(cell, p, prefill, accuracy, score);
  }
  add_pairs(cell, prefill, scores);
}

void EvalReport::add_pairs(const Cell& cell, const std::string& prefill, const std::vector<TaskScore>& scores) {
  const TaskScore* const dense = dense_score(policies_, scores);
  if (dense == nullptr || dense->prompts == 0 || dense->logits.empty()) return;
  pairs_.columns = {{"task", "task"},
                    {"length_tokens", "length"},
                    {"policy", "policy"},
                    {"prefill", "prefill"},
                    {"prompts", "prompts"},
                    {"dense_accuracy", "dense right", 2},
                    {"accuracy", "right", 2},
                    {"same_answers", "same"},
                    {"same_at_least", "at least", 3},
                    {"divergence_nats", "KL", 5},
                    {"divergence_worst_nats", "worst", 3},
                    {"far_budget_tokens", "far budget"}};
  const auto share = [](const TaskScore& score) { return static_cast<double>(score.solved) / score.prompts; };
  for (std::size_t p = 0; p < scores.size(); ++p) {
    const TaskScore& score = scores[p];
    if (&score == dense || score.prompts == 0) continue;
    const auto same =
        static_cast<std::uint64_t>(std::llround(agreement(score.outputs, dense->outputs).same_share * score.prompts));
    const Divergence apart = divergence(score.outputs, dense->outputs, score.logits, dense->logits, vocabulary_);
    pairs_.rows.push_back({to_string(cell.kind), cell.length, policies_.names[p], prefill, score.prompts, share(*dense),
                           share(score), same, at_least(same, score.prompts), apart.nats, apart.worst_nats,
                           score.far_budget == 0 ? Json() : Json(score.far_budget)});
  }
}

void EvalReport::add_passages(std::uint32_t length, const std::string& prefill, const std::vector<TaskScore>& scores) {
  const TaskScore* const dense = dense_score(policies_, scores);
  for (std::size_t p = 0; p < scores.size(); ++p) {
    const TaskScore& score = scores[p];
    if (score.prompts == 0) continue;
    const Prediction predicted = prediction(score.outputs, score.logits, vocabulary_);
    std::vector<Column> columns = {{"length_tokens", "length"},    {"policy", "policy"},
                                   {"prefill", "prefill"},         {"page_tokens", "page"},
                                   {"passages", "passages"},       {"predicted_tokens", "tokens"},
                                   {"perplexity", "perplexity", 4}};
    std::vector<Json> row = {length,           policies_.names[p],  prefill, score.layout.page_tokens, score.prompts,
                             predicted.tokens, predicted.perplexity};
    const std::vector<Column> beside = {{"perplexity_over_dense", "x dense", 4},
                                        {"divergence_nats", "KL", 5},
                                        {"divergence_worst_nats", "worst", 3},
                                        {"same_prediction_share", "same", 1, Column::Show::percent}};
    columns.insert(columns.end(), beside.begin(), beside.end());
    if (dense == nullptr || dense->prompts != score.prompts) {
      row.insert(row.end(), beside.size(), Json());
    } else {
      const Divergence apart = divergence(score.outputs, dense->outputs, score.logits, dense->logits, vocabulary_);
      row.insert(row.end(), {predicted.perplexity / prediction(dense->outputs, dense->logits, vocabulary_).perplexity,
                             apart.nats, apart.worst_nats, same_predictions(score.logits, dense->logits, vocabulary_)});
    }
    append_decode(score.decoded, shape_, score.layout, columns, row);
    append_reached(policies_.specs[p], score.decoded.audited.coverage, columns, row);
    passages_.columns = std::move(columns);
    passages_.rows.push_back(std::move(row));
  }
}

void EvalReport::add(const NeedleOptions& options, const std::vector<NeedleScore>& scores,
                     const AttentionShape& shape) {
  for (std::size_t p = 0; p < scores.size(); ++p) {
    const NeedleScore& score = scores[p];
    if (score.layout.head_dim == 0) continue;
    std::vector<Column> columns = {{"length_tokens", "length"},
                                   {"needles", "needles"},
                                   {"policy", "policy"},
                                   {"page_tokens", "page"},
                                   {"found", "found", 3}};
    std::vector<Json> row = {options.tokens, options.needles, policies_.names[p], score.layout.page_tokens,
                             score.decoded.audited.watched.share_above(0.5)};
    append_decode(score.decoded, shape, score.layout, columns, row);
    columns.push_back({"layer_us", "us/layer", 1});
    row.push_back(score.layer_us);
    append_reached(policies_.specs[p], score.decoded.audited.coverage, columns, row);
    needles_.columns = std::move(columns);
    needles_.rows.push_back(std::move(row));
  }
}

std::vector<Table> EvalReport::tables() const {
  std::vector<Table> tables;
  if (!tasks_.rows.empty()) {
    tables.push_back(tasks_);
    tables.push_back(lost_);  // Without rows, too: which files there are depends on the options alone.
    if (!pairs_.columns.empty()) tables.push_back(pairs_);
  }
  if (!passages_.rows.empty()) tables.push_back(passages_);
  if (!needles_.rows.empty()) tables.push_back(needles_);
  return tables;
}

/// The heads that wanted the answer most and got least of it, for a policy that fails.
void EvalReport::add_lost(const Cell& cell, std::size_t policy, const std::string& prefill, double accuracy,
                          const TaskScore& score) {
  constexpr double kGood = 0.95;
  constexpr std::size_t kNamed = 3;
  if (accuracy >= kGood) return;
  std::vector<LostHead> heads = score.lost;
  std::stable_sort(heads.begin(), heads.end(),
                   [](const LostHead& a, const LostHead& b) { return a.mass - a.kept > b.mass - b.kept; });
  for (std::size_t i = 0; i < std::min(kNamed, heads.size()); ++i) {
    const LostHead& head = heads[i];
    if (head.steps == 0) break;
    lost_.rows.push_back({to_string(cell.kind), cell.length, policies_.names[policy], prefill, accuracy, head.layer,
                          head.head, head.steps, head.mass / static_cast<double>(head.steps), head.kept / head.mass});
  }
}

}  // namespace sluice::tools
