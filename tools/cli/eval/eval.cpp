#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>

#include "tools/cli/dense_flag.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/eval/answers.hpp"
#include "tools/cli/eval/report.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

constexpr const char* kFull = "full";
/// Where prompts are attended sparsely: full, whose prompts are dense.
constexpr const char* kDense = "dense";

struct EvalOptions {
  std::string model;
  std::string tasks;
  std::string policies = "full;sluice";
  PrefillFlags prefill;
  AnswerOptions answers;
  std::string near = "5%";
  EngineFlags engine;
  DeviceFlags device;
  OutputOptions output;
};

/// What the others are held against first, each policy once.
std::vector<NamedPolicy> policies_of(const std::string& text, const PrefillSpec& prefill) {
  std::vector<std::string> names{kFull};
  if (text == "presets") {
    for (const PolicyPreset& preset : policy_presets()) names.push_back(preset.spec.name);
  } else {
    std::ranges::copy(split_policies(text), std::back_inserter(names));
  }
  std::vector<NamedPolicy> policies;
  if (prefill.mode != PrefillMode::full) policies.push_back({.name = kDense, .spec = parse_policy(kFull)});
  for (const std::string& name : names) {
    if (std::ranges::find(policies, name, &NamedPolicy::name) == policies.end())
      policies.push_back({.name = name, .spec = parse_policy(name)});
  }
  return policies;
}

Json config_of(const EvalOptions& options, const EngineFlags& runtime, const std::vector<NamedPolicy>& policies,
               const PrefillSpec& prefill) {
  Json mode = to_json(prefill);
  mode["name"] = to_text(prefill);
  Json compositions = Json::object();
  for (const NamedPolicy& policy : policies) compositions[policy.name] = to_string(policy.spec);
  return {{"model", options.model},
          {"tasks", options.tasks},
          {"policies", compositions},
          {"prefill", std::move(mode)},
          {"prefill_chunk", runtime.prefill_chunk},
          {"decode_prompt", options.answers.decode_prompt},
          {"max_tokens", options.answers.max_tokens},
          {"own_pages", runtime.own_pages},
          {"kv_dtype", to_string(runtime.kv_dtype)},
          {"placement", to_string(runtime.placement)},
          {"fetch_share", fetch_share_json(runtime.fetch_share)},
          {"handover", to_string(runtime.handover)},
          {"graphs", to_string(runtime.graphs)},
          {"dense_tokens", dense_tokens_json(runtime.dense_tokens.value_or(0))},
          {"threads", runtime.threads},
          {"near", options.near},
          {"audit_every", runtime.audit_every},
          {"device", options.device.device}};
}

int run(const EvalOptions& options) {
  AnswerOptions how = options.answers;
  how.prefill = parse_prefill(options.prefill.mode, options.prefill.flex);
  const std::vector<NamedPolicy> policies = policies_of(options.policies, how.prefill);
  how.near = parse_share(options.near, "--near");
  const OutputTarget target(options.output.path);
  const std::shared_ptr<Device> device = make_device(options.device);
  EngineFlags flags = options.engine;
  choose_chunk(flags, device.get(), how.prefill);
  const Model model = load_model(options.model, "", flags.threads, device);
  choose_kv_dtype(flags, model);
  const std::vector<Task> tasks = read_tasks(options.tasks, model.config());
  const Answers evaluation(how, flags, model, policies, device);
  evaluation.check(tasks, options.tasks);
  ProgressBar bar("eval");
  const InterruptScope interrupts;
  Json found = tasks_json(tasks, evaluation.run(tasks, bar), policies);
  Report report{.command = "eval", .config = config_of(options, flags, policies, how.prefill)};
  report.tables = {tasks_table(found["results"])};
  report.extra = {{"tasks", std::move(found)}};
  return deliver(std::move(report), options.output.format, target);
}

}  // namespace

void add_eval(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<EvalOptions>();
  options->engine.audit_every = 1;
  auto* command = app.add_subcommand("eval", "Hold policies against dense attention on tasks: answers and cost");
  command->add_option("--model", options->model, "Hugging Face directory of a Llama")->required()->type_name("DIR");
  command
      ->add_option("--tasks", options->tasks,
                   "A JSON object on each line, {\"task\": name, \"length\": tokens, \"prompt\": ..., \"answer\": "
                   "...}: token ids, or texts if tokens are bytes; `python -m sluice eval --make-tasks FILE "
                   "--token-ids` writes them")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--policies", options->policies,
                   "`presets`, or a comma list; a comma followed by key=value goes on with the policy before it, ; "
                   "always ends it; full is there always")
      ->capture_default_str();
  add_prefill_flags(*command, options->prefill);
  add_count(*command, "--decode-prompt", options->answers.decode_prompt,
            "Last prompt tokens that are read under the policy", {.least = 1});
  add_count(*command, "--max-tokens", options->answers.max_tokens,
            "Of an answer; 0: what the right one takes, and 8 more if it is text");
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->capture_default_str()
      ->type_name("SHARE");
  add_count(*command, "--audit", options->engine.audit_every,
            "Every N-th step also attends densely and reports coverage; 0: never");
  add_device_flags(*command, options->device);
  add_engine_flags(*command, options->engine);
  add_graphs(*command, options->engine.graphs);
  add_output(*command, options->output);
  command->footer(
      "Each policy runs in an engine with the page size that it was made for (see `sluice policies`), unless\n"
      "--page-tokens is given. They are held against full; where --prefill is sparse, against `dense`, which is full\n"
      "with dense prompts. JSON has the form of `python -m sluice eval --json`; `sluice plot` draws both.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
