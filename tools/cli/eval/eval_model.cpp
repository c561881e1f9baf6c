#include "tools/cli/eval/eval_model.hpp"

#include <optional>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

/// The policies with the budget that --far says, at the length of each cell.
class FarBudgets {
 public:
  FarBudgets(const EvalOptions& options, const EngineFlags& flags, const Device* device, const AttentionShape& model)
      : options_(options), flags_(flags), device_(device), model_(model) {
    shape_ = options.far_shape.empty() ? model : preset_config(options.far_shape).shape();
  }

  [[nodiscard]] std::vector<PolicySpec> of(const std::vector<PolicySpec>& policies, std::uint32_t length) {
    std::vector<PolicySpec> cut;
    for (const PolicySpec& policy : policies) {
      const FarPlace place{.shape = shape_,
                           .kv_dtype = flags_.kv_dtype,
                           .placement = flags_.placement,
                           .page_tokens = page_tokens_for(policy, flags_),
                           .tokens = length,
                           .near_hits = usual_near_hits(parse_share(options_.near, "--near"))};
      cut.push_back(with_far_of(policy, options_.far, place, model_, [this] { return rates(); }));
    }
    return cut;
  }

 private:
  [[nodiscard]] const scheduler::LaneRates& rates() {
    if (!rates_) {
      const PageLayout page{.head_dim = shape_.head_dim, .dtype = flags_.kv_dtype};
      rates_ = measured_rates(device_, page.page_bytes(), flags_.threads);
    }
    return *rates_;
  }

  const EvalOptions& options_;
  const EngineFlags& flags_;
  const Device* device_;
  AttentionShape model_;
  AttentionShape shape_;
  std::optional<scheduler::LaneRates> rates_;
};

}  // namespace

std::unique_ptr<EvalReport> evaluate_model(const EvalOptions& options, EngineFlags& flags, const EvalPlan& plan,
                                           ProgressBar& bar) {
  const Model model = load_model(options.model, "", options.engine.threads, plan.device);
  if (!ByteTokenizer::fits(model.config())) {
    throw Error(Errc::invalid_argument,
                "--model: the tasks are written in bytes and need a byte-level model such as tests/data/testbed");
  }
  choose_kv_dtype(flags, model);
  auto report = std::make_unique<EvalReport>(plan.policies, model.config().shape(), model.config().vocab_size);
  TaskEvalOptions task = options.task;
  task.near = parse_share(options.near, "--near");
  const std::string haystack = options.haystack.empty() ? "" : read_input(options.haystack);
  TaskEvaluation evaluation(task, flags, model, plan.policies.specs, plan.device, haystack);
  task.decode_prompt = options.passages.tokens;
  TaskEvaluation reading(task, flags, model, plan.policies.specs, plan.device, "");
  const std::string text = plan.passages.empty() ? "" : read_input(options.passages.text);
  // All of it, not after hours of others.
  for (const Cell& cell : plan.cells)
    evaluation.check(evaluation.tasks_of(cell), "--lengths", to_string(cell.kind), cell.length);
  for (const std::uint32_t length : plan.passages)
    reading.check(passages_of(text, length, task.count), "--text-lengths", "a passage", length);
  FarBudgets budgets(options, flags, plan.device.get(), model.config().shape());
  const auto run = [&](TaskEvaluation& by, std::span<const Task> tasks, const std::string& what, std::uint32_t length,
                       const auto& add) {
    by.replace_policies(budgets.of(plan.policies.specs, length));
    for (const PrefillSpec& prefill : plan.prefills) {
      if (interrupted()) return;
      add(to_text(prefill), by.run(tasks, what + ' ' + std::to_string(length), prefill, bar));
    }
  };
  for (const Cell& cell : plan.cells) {
    run(evaluation, evaluation.tasks_of(cell), to_string(cell.kind), cell.length,
        [&](const std::string& prefill, const auto& scores) { report->add(cell, prefill, scores); });
  }
  for (const std::uint32_t length : plan.passages) {
    run(reading, passages_of(text, length, task.count), "text", length,
        [&](const std::string& prefill, const auto& scores) { report->add_passages(length, prefill, scores); });
  }
  return report;
}

}  // namespace sluice::tools
