// `sluice run --engine`: attention as planned forwards of an Engine.
#include <algorithm>
#include <memory>
#include <optional>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/command.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/generator.hpp"
#include "tools/cli/message.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/values.hpp"
#include "tools/llama/engine_session.hpp"

namespace sluice::tools {
namespace {

void require_served(const RunOptions& options, const PrefillSpec& prefill) {
  const auto refuse = [](const std::string& what, const std::string& remedy) {
    throw Error(Errc::invalid_argument, "--engine: " + what + "; " + remedy);
  };
  if (!options.trace.empty()) refuse("there is no trace of planned forwards", "leave --trace out");
  if (options.runtime.options.audit_every != 0) refuse("there is no audit of planned forwards", "leave --audit out");
  require_for_engine(options.runtime);
  if (prefill.mode != PrefillMode::full)
    refuse("prompts are attended densely", "leave --prefill out, or say --prefill full");
}

Table summary(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy,
              const sluice::Engine& engine) {
  Table table{.key = "run",
              .title = "near, far and brought near: tokens per KV head and decoded token",
              .layout = Table::Layout::pairs};
  std::vector<Json> row;
  append_run(generation, prompt_tokens, policy, table.columns, row);
  const AttentionShape& shape = engine.options().shape;
  const EngineStats stats = engine.stats();
  const double heads = static_cast<double>(shape.layers) * shape.kv_heads *
                       static_cast<double>(std::max<std::size_t>(generation.per_token_s.size(), 1));
  const auto add = [&](Column column, Json value) {
    table.columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  add({"near_tokens", "near", 1}, static_cast<double>(stats.near_tokens) / heads);
  add({"far_tokens", "far", 1}, static_cast<double>(stats.far_tokens) / heads);
  add({"promoted", "brought near", 1}, static_cast<double>(stats.promoted) / heads);
  if (stats.scored != 0) add({"scored", "scored by the CPU", 1}, static_cast<double>(stats.scored) / heads);
  add({"waited_ms", "waited for the CPU, ms per token", 3},
      1e-6 * static_cast<double>(stats.waited_ns) /
          static_cast<double>(std::max<std::size_t>(generation.per_token_s.size(), 1)));
  add({"device_bytes", "device memory for attention, bytes"}, engine.memory().device());
  add({"host_bytes", "host memory for attention, bytes"}, engine.memory().host());
  table.rows.push_back(std::move(row));
  return table;
}

}  // namespace

int run_on_engine(const RunOptions& options) {
  const PolicySpec policy = parse_policy(options.policy);
  const double near = options.near.empty() ? 0.0 : parse_share(options.near, "--near");
  const PrefillSpec prefill = parse_one_prefill(options.prefill);
  require_served(options, prefill);
  const OutputTarget target(options.output.path);
  const std::shared_ptr<Device> device = make_device(options.device);
  const Model model = load_model(options.model, options.random_weights, options.runtime.options.threads, device);
  const SamplerOptions sampling = sampler_of(options, model.generation());
  const std::vector<int> prompt = read_prompt(options.prompt, model.config());
  const std::uint32_t answer = std::min(options.max_tokens, room_behind(prompt.size(), model.config()));
  RuntimeFlags flags = options.runtime;
  choose_chunk(flags, device.get(), std::span(&prefill, 1));
  choose_kv_dtype(flags, model);
  const auto tokens = static_cast<std::uint32_t>(prompt.size()) + answer;
  const EngineRoom room{.page_tokens = page_tokens_for(policy, flags), .tokens = tokens, .near = near};
  sluice::Engine engine(sized(flags, model.config().shape(), {&policy, 1}, room), device);
  EngineSession session(model, engine, device, policy);
  const bool json_on_stdout = options.output.format == Format::json && target.is_stdout();
  const Generation generation = generate(options, sampling, model, session, prompt, !json_on_stdout);

  Report report{.command = "run",
                .config = {{"model", options.model},
                           {"policy", options.policy},
                           {"composition", to_string(policy)},
                           {"engine", true},
                           {"max_tokens", options.max_tokens},
                           {"decode_prompt", options.decode_prompt},
                           {"kv_dtype", to_string(engine.options().kv_dtype)},
                           {"page_tokens", engine.options().page_tokens},
                           {"top_p", sampling.top_p},
                           {"top_k", sampling.top_k},
                           {"near", near},
                           {"temperature", sampling.temperature},
                           {"seed", sampling.seed}}};
  report.extra = {{"text", text_of(generation, model)}, {"tokens", generation.tokens}};
  report.tables.push_back(summary(generation, prompt.size(), policy, engine));
  if (options.output.path.empty() && !json_on_stdout) {
    write_stderr(render(report, options.output.format));
  } else {
    (void)deliver(std::move(report), options.output.format, target);
  }
  return kOk;
}

}  // namespace sluice::tools
