#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "sluice/runtime.hpp"
#include "tools/cli/command.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/prompt_columns.hpp"
#include "tools/cli/progress_bar.hpp"
#include "tools/cli/prompt.hpp"
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

struct RunOptions {
  std::string model;
  std::string random_weights;
  PromptFlags prompt;
  std::string policy = "sluice";
  std::string near;
  std::uint32_t max_tokens = 128;
  std::uint32_t decode_prompt = 0;
  PrefillFlags prefill;
  std::string trace;
  SamplerOptions sampler;
  RuntimeFlags runtime;
  DeviceFlags device;
  OutputOptions output;
};

/// What was generated and how long it took.
struct Generation {
  std::vector<int> tokens;
  double prefill_s = 0.0;           ///< of the prompt but for the tokens that are decoded
  double first_token_s = 0.0;       ///< prefill, prompt tokens decoded, and the choice of the first token
  std::vector<double> per_token_s;  ///< of each later token
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

PolicySpec policy_of(const RunOptions& options) {
  PolicySpec policy = parse_policy(options.policy);
  if (!options.near.empty()) policy.near.share = static_cast<float>(parse_share(options.near, "--near"));
  validate(policy);
  return policy;
}

/// Text for a model that reads bytes, ids for any other.
std::string printable(int token, bool bytes) {
  return bytes ? ByteTokenizer::decode(std::span(&token, 1)) : std::to_string(token) + ' ';
}

class Generator {
 public:
  Generator(const RunOptions& options, const Model& model, Session& session)
      : options_(options), model_(model), session_(session), bytes_(ByteTokenizer::fits(model.config())) {}

  Generation run(std::span<const int> prompt, bool stream) {
    Generation result;
    Sampler sampler(options_.sampler);
    auto start = Clock::now();
    read(prompt, result);
    while (result.tokens.size() < options_.max_tokens) {
      const int token = sampler.next(session_.logits());
      const double took = seconds_since(start);
      if (result.tokens.empty()) {
        result.first_token_s = took;
      } else {
        result.per_token_s.push_back(took);
      }
      if (model_.config().is_eos(token)) break;
      result.tokens.push_back(token);
      if (stream) write_stdout(printable(token, bytes_));
      start = Clock::now();
      if (result.tokens.size() < options_.max_tokens) session_.decode(token);
    }
    if (stream) write_stdout("\n");
    return result;
  }

  [[nodiscard]] Json text(const Generation& generation) const {
    return bytes_ ? Json(ByteTokenizer::decode(generation.tokens)) : Json(nullptr);
  }

 private:
  void read(std::span<const int> prompt, Generation& result) {
    const std::size_t tail = std::min<std::size_t>(options_.decode_prompt, prompt.size() - 1);
    ProgressBar bar("prefill");
    const auto start = Clock::now();
    session_.prefill(prompt.first(prompt.size() - tail),
                     [&](std::uint32_t done, std::uint32_t total) { bar.update(done, total); });
    result.prefill_s = seconds_since(start);
    for (const int token : prompt.last(tail)) session_.decode(token);
  }

  const RunOptions& options_;
  const Model& model_;
  Session& session_;
  bool bytes_;
};

Table summary(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy, const Stats& stats,
              const AttentionShape& shape) {
  Table table{.key = "run", .title = kStatsNote, .layout = Table::Layout::pairs};
  std::vector<Json> row;
  const auto add = [&](Column column, Json value) {
    table.columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  double total = 0.0;
  for (const double took : generation.per_token_s) total += took;
  const bool decoded = !generation.per_token_s.empty();
  const auto ms = [&](double fraction) {
    return decoded ? Json(1e3 * percentile(generation.per_token_s, fraction)) : Json();
  };
  add({"policy", "policy"}, policy.name);
  add({"prompt_tokens", "prompt tokens"}, prompt_tokens);
  add({"generated_tokens", "generated tokens"}, generation.tokens.size());
  add({"ttft_ms", "time to first token, ms", 1}, 1e3 * generation.first_token_s);
  add({"tpot_p50_ms", "time per token p50, ms", 2}, ms(0.50));
  add({"tpot_p99_ms", "time per token p99, ms", 2}, ms(0.99));
  add({"decode_tokens_per_s", "decoded tokens per s", 1},
      decoded ? Json(static_cast<double>(generation.per_token_s.size()) / total) : Json());
  append_stats(stats, shape, table.columns, row);
  add({"h2d_bytes", "bytes to the device, prefill included"}, stats.h2d_bytes);
  add({"d2h_bytes", "bytes to the host, prefill included"}, stats.d2h_bytes);
  table.rows.push_back(std::move(row));
  return table;
}

Json config_of(const RunOptions& options, const PolicySpec& policy, const PrefillSpec& prefill,
               const RuntimeOptions& runtime) {
  return {{"model", options.model},
          {"policy", options.policy},
          {"composition", to_string(policy)},
          {"max_tokens", options.max_tokens},
          {"decode_prompt", options.decode_prompt},
          {"prefill", to_json(prefill)},
          {"temperature", options.sampler.temperature},
          {"top_p", options.sampler.top_p},
          {"seed", options.sampler.seed},
          {"runtime", to_json(runtime)}};
}

int run(const RunOptions& options) {
  const PolicySpec policy = policy_of(options);
  const PrefillSpec prefill = parse_one_prefill(options.prefill);
  const OutputTarget target(options.output.path);
  const std::optional<OutputTarget> trace_target =
      options.trace.empty() ? std::nullopt : std::optional<OutputTarget>(options.trace);
  const std::shared_ptr<Device> device = make_device(options.device);
  const Model model = load_model(options.model, options.random_weights, options.runtime.options.threads, device);
  const std::vector<int> prompt = read_prompt(options.prompt, model.config());

  TraceFile trace;
  const AttentionShape shape = model.config().shape();
  const auto tokens = static_cast<std::uint32_t>(prompt.size()) + options.max_tokens;
  RuntimeFlags flags = options.runtime;
  flags.options.page_tokens = page_tokens_for(policy, flags);
  choose_chunk(flags, device.get(), std::span(&prefill, 1));
  RuntimeOptions runtime_options = sized(flags, shape, std::span(&policy, 1), tokens);
  if (trace_target) runtime_options.trace = &trace;
  Runtime runtime(runtime_options, device);
  Session session(model, runtime, policy, prefill);
  Generator generator(options, model, session);

  // One JSON object and streamed text cannot share standard output.
  const bool json_on_stdout = options.output.format == Format::json && target.is_stdout();
  const Generation generation = generator.run(prompt, !json_on_stdout);

  runtime.synchronize();  // Counters of the prompt are complete then.
  const Stats stats = session.stats();
  Report report{.command = "run", .config = config_of(options, policy, prefill, runtime_options)};
  report.extra = {{"text", generator.text(generation)}, {"tokens", generation.tokens}};
  report.tables.push_back(summary(generation, prompt.size(), policy, stats, shape));
  report.tables.push_back(first_token_table(
      stats.prompt, {.prefill_ms = 1e3 * generation.prefill_s, .ttft_ms = 1e3 * generation.first_token_s}));
  const std::string rendered = render(report, options.output.format);
  if (target.is_stdout() && !json_on_stdout) {
    std::fputs(rendered.c_str(), stderr);
  } else {
    target.commit(rendered);
  }
  if (trace_target) trace_target->commit(trace.json());
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  auto* command = app.add_subcommand("run", "Generate text with a Llama whose KV cache lives in host memory");
  command->add_option("--model", options->model, "Hugging Face directory: config.json and safetensors")
      ->type_name("DIR");
  command
      ->add_option("--random-weights", options->random_weights,
                   "Instead of --model: a known shape with random weights, for speed: llama-3.1-8b, tiny")
      ->type_name("NAME");
  add_prompt_flags(*command, options->prompt);
  command->add_option("--policy", options->policy, "Policy: a preset or a composition of stages; see `sluice policies`")
      ->capture_default_str();
  command->add_option("--near", options->near, "Share of the pages kept near, e.g. 10% [default: the policy's]")
      ->type_name("SHARE");
  command->add_option("--max-tokens", options->max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--decode-prompt", options->decode_prompt,
                   "Last prompt tokens to read under the policy, one by one, instead of densely")
      ->capture_default_str();
  add_prefill_flags(*command, options->prefill, false);
  command->add_option("--temperature", options->sampler.temperature, "0: the likeliest token; larger is more random")
      ->capture_default_str();
  command
      ->add_option("--top-p", options->sampler.top_p, "Sample among the likeliest tokens that hold this share, (0, 1]")
      ->capture_default_str();
  command->add_option("--seed", options->sampler.seed, "Seed of the sampling")->capture_default_str();
  command
      ->add_option("--audit", options->runtime.options.audit_every,
                   "Every N-th step also attends densely and reports coverage; 0: never")
      ->capture_default_str();
  command->add_option("--trace", options->trace, "Write what ran when, for ui.perfetto.dev")->type_name("FILE");
  add_device_flags(*command, options->device);
  add_runtime_flags(*command, options->runtime);
  add_output(*command, options->output);
  command->footer(
      "Text goes to standard output as it comes, the table to standard error. With -o json standard output\n"
      "holds one object with the text in it.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
