// `sluice run --stepwise`: every layer driven by the calling thread, through a Runtime.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "sluice/runtime.hpp"
#include "tools/cli/command.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/generator.hpp"
#include "tools/cli/message.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/progress_bar.hpp"
#include "tools/cli/prompt.hpp"
#include "tools/cli/prompt_columns.hpp"
#include "tools/cli/runtime_flags.hpp"
#include "tools/cli/stats_columns.hpp"
#include "tools/cli/trace_file.hpp"
#include "tools/cli/values.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/session.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

PolicySpec policy_of(const RunOptions& options) {
  PolicySpec policy = parse_policy(options.policy);
  if (!options.near.empty()) policy.near.share = static_cast<float>(parse_share(options.near, "--near"));
  validate(policy);
  return policy;
}

Table summary(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy, const Stats& stats,
              const AttentionShape& shape) {
  Table table{.key = "run", .title = kStatsNote, .layout = Table::Layout::pairs};
  std::vector<Json> row;
  append_run(generation, prompt_tokens, policy, table.columns, row);
  append_stats(stats, shape, table.columns, row);
  const auto add = [&](Column column, Json value) {
    table.columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  add({.key = "h2d_bytes", .title = "bytes to the device, prefill included", .hidden = !offloaded(stats)},
      stats.h2d_bytes);
  add({.key = "d2h_bytes", .title = "bytes to the host, prefill included", .hidden = !offloaded(stats)},
      stats.d2h_bytes);
  table.rows.push_back(std::move(row));
  return table;
}

Json config_of(const RunOptions& options, const SamplerOptions& sampling, const PolicySpec& policy,
               const PrefillSpec& prefill, const RuntimeOptions& runtime) {
  return {{"model", options.model},
          {"policy", options.policy},
          {"composition", to_string(policy)},
          {"max_tokens", options.max_tokens},
          {"decode_prompt", options.decode_prompt},
          {"prefill", to_json(prefill)},
          {"temperature", sampling.temperature},
          {"top_p", sampling.top_p},
          {"top_k", sampling.top_k},
          {"seed", sampling.seed},
          {"runtime", to_json(runtime)}};
}

}  // namespace

int run_stepwise(const RunOptions& options) {
  const PolicySpec policy = policy_of(options);
  const PrefillSpec prefill = parse_one_prefill(options.prefill);
  const OutputTarget target(options.output.path);
  const std::optional<OutputTarget> trace_target =
      options.trace.empty() ? std::nullopt : std::optional<OutputTarget>(options.trace);
  const std::shared_ptr<Device> device = make_device(options.device);
  const Model model = load_model(options.model, options.random_weights, options.runtime.options.threads, device);
  const SamplerOptions sampling = sampler_of(options, model.generation());
  const std::vector<int> prompt = read_prompt(options.prompt, model.config());

  TraceFile trace;
  const AttentionShape shape = model.config().shape();
  const std::uint32_t answer = std::min(options.max_tokens, room_behind(prompt.size(), model.config()));
  const auto tokens = static_cast<std::uint32_t>(prompt.size()) + answer;
  RuntimeFlags flags = options.runtime;
  flags.options.page_tokens = page_tokens_for(policy, flags);
  choose_chunk(flags, device.get(), std::span(&prefill, 1));
  choose_kv_dtype(flags, model);
  RuntimeOptions runtime_options = sized(flags, shape, std::span(&policy, 1), tokens);
  if (trace_target) runtime_options.trace = &trace;
  Runtime runtime(runtime_options, device);
  Session session(model, runtime, policy, prefill);

  // One JSON object and streamed text cannot share standard output.
  const bool json_on_stdout = options.output.format == Format::json && target.is_stdout();
  const Generation generation = generate(options, sampling, model, session, prompt, !json_on_stdout);

  runtime.synchronize();  // Counters of the prompt are complete then.
  const Stats stats = session.stats();
  Report report{.command = "run", .config = config_of(options, sampling, policy, prefill, runtime_options)};
  report.extra = {{"text", text_of(generation, model)}, {"tokens", generation.tokens}};
  report.tables.push_back(summary(generation, prompt.size(), policy, stats, shape));
  report.tables.push_back(first_token_table(
      stats.prompt, {.prefill_ms = 1e3 * generation.prefill_s, .ttft_ms = 1e3 * generation.first_token_s}));
  if (options.output.path.empty() && !json_on_stdout) {
    write_stderr(render(report, options.output.format));
  } else {
    (void)deliver(std::move(report), options.output.format, target);
  }
  if (trace_target) trace_target->commit(trace.json());
  if (trace.dropped() != 0)
    say("warning: the trace lacks " + std::to_string(trace.dropped()) + " events: out of memory");
  return kOk;
}

}  // namespace sluice::tools
