#include <algorithm>
#include <memory>

#include "sluice/runtime.hpp"
#include "tools/cli/command.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/progress_bar.hpp"
#include "tools/cli/runtime_flags.hpp"
#include "tools/cli/stats_columns.hpp"
#include "tools/cli/values.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/session.hpp"
#include "tools/llama/tasks.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

struct EvalOptions {
  std::string model;
  std::string tasks = "niah,multikey,kv";
  std::string lengths = "2048,8192";
  std::string policies = "full,topk,streaming,lfps,sluice";
  std::uint32_t count = 16;
  std::uint32_t decode_prompt = 24;
  std::uint32_t max_tokens = 0;
  std::uint64_t seed = 0;
  std::string haystack;
  RuntimeFlags runtime;
  DeviceFlags device;
  OutputOptions output;
};

/// A policy's results over the prompts of one (task, length).
struct Score {
  std::uint32_t prompts = 0;
  std::uint32_t solved = 0;
  Stats stats;
};

/// A task at a length, for all policies.
struct Cell {
  TaskKind kind{};
  std::uint32_t length = 0;
};

/// Runs one experiment. Each prompt is prefilled once, densely; each policy then starts from the same keys and
/// values, reads the last tokens of the question and answers.
class Evaluation {
 public:
  Evaluation(const EvalOptions& options, const Model& model, std::vector<PolicySpec> policies,
             std::shared_ptr<Device> device)
      : options_(options), model_(model), policies_(std::move(policies)), device_(std::move(device)) {
    if (!options.haystack.empty()) haystack_ = read_text_file(options.haystack);
  }

  std::vector<Score> run(const Cell& cell, ProgressBar& bar) {
    std::vector<Task> tasks;
    std::size_t tokens = 0;
    for (std::uint32_t i = 0; i < options_.count; ++i) {
      tasks.push_back(make_task(cell.kind, cell.length, options_.seed + i, haystack_));
      tokens = std::max(tokens, kBosTokens + tasks.back().prompt.size() + answer_limit(tasks.back()));
    }
    const AttentionShape shape = model_.config().shape();
    runtime_options_ = sized(options_.runtime, shape, policies_, static_cast<std::uint32_t>(tokens));
    Runtime runtime(runtime_options_, device_);
    std::vector<Score> scores(policies_.size());
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const std::vector<int> prompt = ByteTokenizer::encode(tasks[i].prompt);
      const std::size_t tail = std::min<std::size_t>(options_.decode_prompt, prompt.size() - 1);
      const PromptCache cache = prefill(runtime, std::span(prompt).first(prompt.size() - tail));
      for (std::size_t p = 0; p < policies_.size(); ++p) {
        answer(runtime, cache, std::span(prompt).last(tail), tasks[i], policies_[p], scores[p]);
        bar.update(i * policies_.size() + p + 1, tasks.size() * policies_.size(),
                   std::string(to_string(cell.kind)) + ' ' + std::to_string(cell.length) + ' ' + policies_[p].name);
      }
    }
    return scores;
  }

  /// How the runtime was built for the last cell.
  [[nodiscard]] const RuntimeOptions& runtime_options() const noexcept { return runtime_options_; }

 private:
  static constexpr std::size_t kBosTokens = 1;

  [[nodiscard]] std::size_t answer_limit(const Task& task) const {
    return options_.max_tokens == 0 ? task.answer.size() : options_.max_tokens;
  }

  PromptCache prefill(Runtime& runtime, std::span<const int> tokens) {
    PromptCache cache;
    Session session(model_, runtime, parse_policy("full"));
    session.prefill(tokens, {}, &cache);
    return cache;
  }

  void answer(Runtime& runtime, const PromptCache& cache, std::span<const int> question, const Task& task,
              const PolicySpec& policy, Score& score) {
    Session session(model_, runtime, policy);
    session.import_prompt(cache);
    for (const int token : question) session.decode(token);
    const std::size_t limit = answer_limit(task);
    std::vector<int> output;
    while (output.size() < limit) {
      const int token = argmax(output.empty() && question.empty() ? cache.logits() : session.logits());
      if (model_.config().is_eos(token)) break;
      output.push_back(token);
      if (output.size() < limit) session.decode(token);
    }
    ++score.prompts;
    score.solved += solved(task, ByteTokenizer::decode(output)) ? 1 : 0;
    score.stats.merge(session.stats());
  }

  const EvalOptions& options_;
  const Model& model_;
  std::vector<PolicySpec> policies_;
  std::shared_ptr<Device> device_;
  std::string haystack_;
  RuntimeOptions runtime_options_;
};

std::vector<Cell> cells_of(const EvalOptions& options) {
  std::vector<Cell> cells;
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--lengths");
  for (const std::string& task : split_list(options.tasks)) {
    for (const std::uint32_t length : lengths) cells.push_back({parse_task_kind(task), length});
  }
  if (cells.empty()) throw Error(Errc::invalid_argument, "--tasks: the list is empty; name at least one, e.g. niah,kv");
  return cells;
}

Json config_of(const EvalOptions& options, const RuntimeOptions& runtime) {
  return {{"model", options.model},           {"tasks", split_list(options.tasks)},
          {"lengths", options.lengths},       {"policies", split_policies(options.policies)},
          {"count", options.count},           {"decode_prompt", options.decode_prompt},
          {"max_tokens", options.max_tokens}, {"seed", options.seed},
          {"haystack", options.haystack},     {"runtime_of_last", to_json(runtime)}};
}

void append_scores(Table& table, const Cell& cell, const std::vector<Score>& scores,
                   const std::vector<std::string>& names, const AttentionShape& shape) {
  for (std::size_t p = 0; p < scores.size(); ++p) {
    std::vector<Column> columns = {{"task", "task"},
                                   {"length_tokens", "length"},
                                   {"policy", "policy"},
                                   {"prompts", "prompts"},
                                   {"accuracy", "accuracy", 2}};
    std::vector<Json> row = {to_string(cell.kind), cell.length, names[p], scores[p].prompts,
                             static_cast<double>(scores[p].solved) / scores[p].prompts};
    append_stats(scores[p].stats, shape, columns, row);
    table.columns = std::move(columns);
    table.rows.push_back(std::move(row));
  }
}

int run(const EvalOptions& options) {
  const std::vector<PolicySpec> policies = parse_policies(options.policies);
  const std::vector<Cell> cells = cells_of(options);
  const OutputTarget target(options.output.path);
  const std::shared_ptr<Device> device = make_device(options.device);
  const Model model = load_model(options.model, "", options.runtime.options.threads, device);
  if (!ByteTokenizer::fits(model.config())) {
    throw Error(Errc::invalid_argument,
                "--model: the tasks are written in bytes and need a byte-level model such as "
                "tests/data/testbed");
  }
  Evaluation evaluation(options, model, policies, device);
  Table table{.key = "eval", .title = kStatsNote};
  ProgressBar bar("eval");
  for (const Cell& cell : cells) {
    append_scores(table, cell, evaluation.run(cell, bar), split_policies(options.policies), model.config().shape());
  }
  Report report{.command = "eval", .config = config_of(options, evaluation.runtime_options())};
  report.tables.push_back(std::move(table));
  target.commit(render(report, options.output.format));
  return kOk;
}

}  // namespace

void add_eval(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<EvalOptions>();
  options->runtime.options.audit_every = 1;
  auto* command = app.add_subcommand("eval", "Compare policies on retrieval tasks: accuracy, coverage and cost");
  command->add_option("--model", options->model, "Hugging Face directory of a byte-level Llama")
      ->type_name("DIR")
      ->required();
  command->add_option("--tasks", options->tasks, "Comma list of niah, niah_long, multikey, kv, track, copy")
      ->capture_default_str();
  command->add_option("--lengths", options->lengths, "Comma list of prompt lengths in tokens, K allowed")
      ->capture_default_str();
  command
      ->add_option("--policies", options->policies,
                   "Comma list; a comma followed by key=value goes on with the policy before it, ; always ends it")
      ->capture_default_str();
  command->add_option("--count", options->count, "Prompts per task and length")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--decode-prompt", options->decode_prompt, "Last prompt tokens that are read under the policy")
      ->capture_default_str();
  command
      ->add_option("--max-tokens", options->max_tokens, "Tokens to generate per prompt; 0: as many as the answer has")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the first prompt; the others follow")->capture_default_str();
  command->add_option("--haystack", options->haystack, "Filler text [default: the testbed's five sentences]")
      ->type_name("FILE");
  command
      ->add_option("--audit", options->runtime.options.audit_every,
                   "Every N-th step also attends densely and reports coverage; 0: never")
      ->capture_default_str();
  add_device_flags(*command, options->device);
  add_runtime_flags(*command, options->runtime);
  add_output(*command, options->output);
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
