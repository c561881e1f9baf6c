#include <algorithm>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/dense_flag.hpp"
#include "tools/cli/eval/eval_model.hpp"
#include "tools/cli/eval/prompts.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/presets.hpp"

namespace sluice::tools {
namespace {

/// "": none, beside needles.
std::vector<std::string> listed_tasks(const EvalOptions& options) {
  return options.tasks.empty() ? std::vector<std::string>() : split_list(options.tasks, "--tasks");
}

NamedPolicies policies_of(const std::string& text) {
  NamedPolicies policies;
  if (text == "presets") {
    for (const PolicyPreset& preset : policy_presets()) {
      policies.names.push_back(preset.spec.name);
      policies.specs.push_back(preset.spec);
    }
  } else {
    policies = {.names = split_policies(text), .specs = parse_policies(text)};
  }
  return policies;
}

std::vector<Cell> cells_of(const EvalOptions& options) {
  std::vector<Cell> cells;
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--lengths");
  for (const std::string& task : listed_tasks(options)) {
    for (const std::uint32_t length : lengths) cells.push_back({parse_task_kind(task), length});
  }
  return cells;
}

std::vector<NeedleOptions> needles_of(const EvalOptions& options) {
  std::vector<NeedleOptions> needles;
  if (options.needles.empty()) {
    if (options.sinks.empty()) return needles;
    throw Error(Errc::invalid_argument, "--sinks: only synthetic attention has sinks to choose; give --needles 1 too");
  }
  const std::vector<std::uint32_t> tokens = parse_counts(options.needle_tokens, "--needle-tokens");
  if (tokens.size() != 1) {
    throw Error(Errc::invalid_argument,
                "--needle-tokens: '" + options.needle_tokens + "' is not one length such as 128K");
  }
  for (const std::uint32_t count : parse_counts(options.needles, "--needles")) {
    needles.push_back({.tokens = tokens.front(),
                       .needles = count,
                       .steps = options.needle_steps,
                       .seed = options.task.seed,
                       .sinks = options.sinks,
                       .near = parse_share(options.near, "--near")});
    check(needles.back());
  }
  return needles;
}

Json config_of(const EvalOptions& options, const EngineFlags& runtime, const NamedPolicies& policies,
               std::span<const PrefillSpec> prefills) {
  Json modes = Json::array();
  for (const PrefillSpec& prefill : prefills) modes.push_back(to_json(prefill));
  Json compositions = Json::object();
  for (std::size_t i = 0; i < policies.names.size(); ++i)
    compositions[policies.names[i]] = to_string(policies.specs[i]);
  return {{"model", options.model},
          {"tasks", listed_tasks(options)},
          {"lengths", options.lengths},
          {"policies", compositions},
          {"prefill", modes},
          {"prefill_chunk", runtime.prefill_chunk},
          {"count", options.task.count},
          {"decode_prompt", options.task.decode_prompt},
          {"max_tokens", options.task.max_tokens},
          {"seed", options.task.seed},
          {"haystack", options.haystack},
          {"text", options.passages.text},
          {"text_lengths", options.passages.text.empty() ? "" : options.passages.lengths},
          {"text_tokens", options.passages.tokens},
          {"needles", options.needles},
          {"needle_tokens", options.needle_tokens},
          {"needle_steps", options.needle_steps},
          {"sinks", options.sinks},
          {"own_pages", runtime.own_pages},
          {"kv_dtype", to_string(runtime.kv_dtype)},
          {"placement", to_string(runtime.placement)},
          {"fetch_share", fetch_share_json(runtime.fetch_share)},
          {"handover", to_string(runtime.handover)},
          {"graphs", to_string(runtime.graphs)},
          {"dense_tokens", dense_tokens_json(runtime.dense_tokens.value_or(0))},
          {"threads", runtime.threads},
          {"near", options.near},
          {"far", options.far},
          {"far_shape", options.far_shape},
          {"paired", options.task.logits},
          {"audit_every", runtime.audit_every},
          {"device", options.device.device}};
}

/// What goes together, before anything runs.
void check(const EvalOptions& options, const NamedPolicies& policies) {
  if (!options.far.empty() && options.far != "auto") (void)with_far("sluice", options.far, {}, {});
  if (!options.far_shape.empty()) {
    if (options.far.empty())
      throw Error(Errc::invalid_argument, "--far-shape: says whose budget --far is; give --far auto, or a number, too");
    (void)preset_config(options.far_shape);
  }
  const auto dense = [](const PolicySpec& policy) { return policy.uses(Source::all); };
  if (options.task.logits && std::ranges::none_of(policies.specs, dense))
    throw Error(Errc::invalid_argument, "--paired: compares with dense attention; name full among --policies");
}

int run(const EvalOptions& options) {
  EvalPlan plan{.policies = policies_of(options.policies),
                .prefills = {},
                .cells = cells_of(options),
                .passages = {},
                .device = nullptr};
  if (!options.prompts.empty()) {
    const std::string haystack = options.haystack.empty() ? "" : read_input(options.haystack);
    OutputTarget(options.prompts).commit(prompts_of(plan.cells, options.task, haystack));
    return 0;
  }
  check(options, plan.policies);
  const std::vector<NeedleOptions> needles = needles_of(options);
  plan.prefills = parse_prefills(options.prefill);
  plan.passages = passage_lengths(options.passages);
  const bool modelled = !plan.cells.empty() || !plan.passages.empty();
  if (!modelled && needles.empty()) {
    throw Error(Errc::invalid_argument,
                "--tasks: the list is empty; name at least one, e.g. niah,kv, or give --needles 1");
  }
  if (modelled && options.model.empty()) {
    throw Error(Errc::invalid_argument,
                "--model: the tasks need one, such as tests/data/testbed; or give --tasks \"\"");
  }
  require_distinct({{"--output", options.output.path}, {"--plot", options.plot, !options.plot.empty()}});
  const OutputTarget target(options.output.path);
  const std::unique_ptr<OutputTarget> plot =
      options.plot.empty() ? nullptr : std::make_unique<OutputTarget>(options.plot);
  plan.device = make_device(options.device);
  EngineFlags flags = options.engine;
  choose_chunk(flags, plan.device.get(), plan.prefills);
  ProgressBar bar("eval");
  const InterruptScope interrupts;
  const std::unique_ptr<EvalReport> report = modelled ? evaluate_model(options, flags, plan, bar)
                                                      : std::make_unique<EvalReport>(plan.policies, AttentionShape{});
  const EngineFlags& needle_flags = options.engine;
  for (const NeedleOptions& planted : needles) {
    if (interrupted()) break;
    report->add(planted, evaluate_needles(planted, needle_flags, plan.policies.specs, plan.device, bar),
                needle_shape());
  }
  Report result{.command = "eval", .config = config_of(options, flags, plan.policies, plan.prefills)};
  result.tables = report->tables();
  const bool found = std::ranges::any_of(result.tables, [](const Table& table) { return !table.rows.empty(); });
  return deliver_beside(std::move(result), options.output.format, target, plot && found ? report->svg() : "",
                        plot ? *plot : target);
}

}  // namespace

void add_eval(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<EvalOptions>();
  options->engine.audit_every = 1;
  auto* command = app.add_subcommand("eval", "Compare policies on retrieval tasks: accuracy, coverage and cost");
  command->add_option("--model", options->model, "Hugging Face directory of a byte-level Llama")->type_name("DIR");
  command
      ->add_option("--tasks", options->tasks,
                   "Comma list of niah, niah_long, multikey, kv, track, copy, multi, table, near_keys, turns, count, "
                   "long_copy")
      ->capture_default_str();
  command->add_option("--lengths", options->lengths, "Comma list of prompt lengths in tokens, K allowed")
      ->capture_default_str();
  command
      ->add_option(
          "--policies", options->policies,
          "`presets`, or a comma list; a comma followed by key=value goes on with the policy before it, ; always "
          "ends it")
      ->capture_default_str();
  add_prefill_flags(*command, options->prefill, true);
  add_count(*command, "--count", options->task.count, "Prompts per task and length", {.least = 1, .most = 1 << 20});
  add_count(*command, "--decode-prompt", options->task.decode_prompt,
            "Last prompt tokens that are read under the policy");
  add_count(*command, "--max-tokens", options->task.max_tokens,
            "Tokens to generate per prompt; 0: as many as the answer has");
  add_seed(*command, options->task.seed, "Seed of the first prompt; the others follow");
  command->add_option("--haystack", options->haystack, "Filler text [default: the testbed's five sentences]")
      ->type_name("FILE");
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->capture_default_str()
      ->type_name("SHARE");
  command->add_flag("--paired", options->task.logits,
                    "Also compare with dense attention prompt by prompt: the same answers, with a bound, and KL");
  add_far(*command, options->far);
  command
      ->add_option("--far-shape", options->far_shape,
                   "Model shape, such as llama-3.1-8b, whose budget --far is at each length: this model gets as many "
                   "tokens for each query head")
      ->type_name("SHAPE");
  add_passage_flags(*command, options->passages);
  command
      ->add_option("--write-prompts", options->prompts,
                   "Write prompts and answers as JSON lines, a byte a code point, instead of running any")
      ->type_name("FILE");
  command
      ->add_option(
          "--needles", options->needles,
          "Also synthetic attention of Llama-3.1-8B's shape: comma list of needles per step, e.g. 1,16; needs no model")
      ->type_name("LIST");
  command->add_option("--needle-tokens", options->needle_tokens, "Length of the synthetic context, K allowed")
      ->capture_default_str();
  add_count(*command, "--needle-steps", options->needle_steps, "Decode steps, after two that are not timed",
            {.least = 1, .most = 1024});
  add_sinks(*command, options->sinks);
  command->add_option("--plot", options->plot, "Write accuracy against bytes read as an SVG")->type_name("FILE");
  add_count(*command, "--audit", options->engine.audit_every,
            "Every N-th step also attends densely and reports coverage; 0: never");
  add_device_flags(*command, options->device);
  add_engine_flags(*command, options->engine);
  add_graphs(*command, options->engine.graphs);
  add_output(*command, options->output);
  command->footer(
      "Each policy runs in an engine with the page size that it was made for (see `sluice policies`), unless\n"
      "--page-tokens is given.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
