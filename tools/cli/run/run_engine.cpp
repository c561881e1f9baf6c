// `sluice run`: attention as planned forwards of an Engine.
#include <algorithm>
#include <memory>
#include <optional>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/near_share.hpp"
#include "tools/cli/run/generator.hpp"
#include "tools/cli/run/session_file.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/engine_session.hpp"

namespace sluice::tools {
namespace {

Table summary(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy,
              const sluice::Engine& engine, const EngineSession& session) {
  Table table{.key = "run", .title = kDecodeNote, .layout = Table::Layout::pairs};
  std::vector<Json> row;
  append_run(generation, prompt_tokens, policy, table.columns, row);
  const EngineOptions& options = engine.options();
  DecodeScore score{.tokens = session.decoded(),
                    .dense_tokens = session.visible(),
                    .stats = engine.stats(),
                    .audited = engine.audit(session.sequence()),
                    .code_bits = engine.sizes().code_bits};
  append_decode(score, options.shape,
                {.page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype},
                table.columns, row);
  const auto add = [&](Column column, Json value) {
    table.columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  append_blocks(score.stats, table.columns, row);
  add({"waited_ms", "waited for the CPU, ms per token", 3},
      session.decoded() == 0 ? Json() : Json(1e-6 * static_cast<double>(score.stats.waited_ns) / session.decoded()));
  add({"device_bytes", "device memory for attention, bytes"}, engine.memory().device());
  add({"host_bytes", "host memory for attention, bytes"}, engine.memory().host());
  if (options.dense_tokens != 0) add({"dense_tokens", "all are attended up to, tokens"}, options.dense_tokens);
  const std::uint64_t attended = score.stats.near_tokens + score.stats.far_tokens + score.stats.fetched_tokens;
  if (!policy.uses(Source::all) && score.tokens != 0 &&
      attended == score.dense_tokens * options.shape.layers * options.shape.kv_heads)
    add({"attended_whole", "what the policy chose"}, "nothing: every token was attended");
  table.rows.push_back(std::move(row));
  return table;
}

/// Of the tokens, the share that device memory has room for where nobody says: a part of long sequences, all of short
/// ones, which are attended whole; and of that memory no more than a part.
double near_share(const Device* device, const EngineFlags& flags, const AttentionShape& shape, std::uint32_t tokens) {
  constexpr double kShortTokens = 16'384.0;
  constexpr double kOfDevice = 0.125;
  if (device == nullptr) return usual_near_share(tokens);
  const PageLayout layout{.head_dim = shape.head_dim, .dtype = flags.kv_dtype};
  const double token = 2.0 * static_cast<double>(layout.near().row_bytes()) * shape.layers * shape.kv_heads;
  const double most = kOfDevice * static_cast<double>(device->info().memory_bytes) / token;
  return std::clamp(std::min(kShortTokens, most) / tokens, usual_near_share(tokens), 1.0);
}

}  // namespace

int run(const RunOptions& options) {
  const PolicySpec given = parse_policy(options.policy);
  if (options.far != "auto") (void)with_far(options.policy, options.far, {}, {});  // Refused before anything is read.
  const PrefillSpec prefill = parse_prefill(options.prefill.mode, options.prefill.flex);
  const OutputTarget target(options.output.path);
  const OutputTarget trace_target(options.trace);
  const std::shared_ptr<Device> device = make_device(options.device);
  const Model model = load_model(options.model, options.random_weights, options.engine.threads, device);
  const SamplerOptions sampling = sampler_of(options, model.generation());
  const std::vector<int> prompt = read_prompt(options.prompt, model.config());
  const std::uint32_t answer = std::min(options.max_tokens, room_behind(prompt.size(), model.config()));
  EngineFlags flags = options.engine;
  choose_chunk(flags, device.get(), prefill);
  choose_kv_dtype(flags, model);
  const auto tokens = static_cast<std::uint32_t>(prompt.size()) + answer;
  const double near = options.near.empty() ? near_share(device.get(), flags, model.config().shape(), tokens)
                                           : parse_share(options.near, "--near");
  const FarPlace place{.shape = model.config().shape(),
                       .kv_dtype = flags.kv_dtype,
                       .placement = flags.placement,
                       .page_tokens = page_tokens_for(given, flags),
                       .tokens = tokens,
                       .near_hits = usual_near_hits(near)};
  const std::string policy_text = with_far(options.policy, options.far, place, [&] {
    const PageLayout layout{.head_dim = place.shape.head_dim, .dtype = place.kv_dtype};
    return measured_rates(device.get(), layout.page_bytes(), flags.threads);
  });
  if (!options.far.empty()) say("the policy is " + policy_text);
  const PolicySpec policy = parse_policy(policy_text);
  if (!flags.dense_tokens && given == parse_policy(RunOptions{}.policy)) flags.dense_tokens = kDenseAuto;
  const EngineRoom room{
      .page_tokens = page_tokens_for(policy, flags), .tokens = tokens, .near = near, .prefill = prefill};
  EngineOptions sizes = sized(flags, model.config().shape(), {&policy, 1}, room);
  sizes.largest.trace = !options.trace.empty();
  sluice::Engine engine(sizes, device);
  const auto read =
      std::span(prompt).first(prompt.size() - std::min<std::size_t>(options.decode_prompt, prompt.size() - 1));
  if (!options.session.empty()) require_room(options.session, sizes, static_cast<std::uint32_t>(read.size()));
  const std::string session_of = options.session.empty() ? "" : session_model(options, policy, prefill);
  const std::optional<SequenceId> resumed =
      options.session.empty() ? std::nullopt : resume_session(engine, options.session, session_of, read);
  const auto runner = std::make_shared<Runner>(model, engine, device, flags.graphs);
  EngineSession session = resumed ? EngineSession(runner, *resumed) : EngineSession(runner, policy);
  const std::uint32_t resumed_tokens = session.tokens();
  ParkedPrompt parked(session, engine, options.session, session_of);
  TraceLog log;
  if (sizes.largest.trace)
    session.on_trace([&](const ForwardTrace& trace, bool reads) { log.add(reads ? "prompt" : "decode", trace); });
  session.audit_every(options.engine.audit_every);
  const bool json_on_stdout = options.output.format == Format::json && target.is_stdout();
  const Generation generation =
      generate(options, sampling, model, options.session.empty() ? static_cast<Conversation&>(session) : parked, prompt,
               !json_on_stdout);

  Report report{.command = "run",
                .config = {{"model", options.model},
                           {"policy", policy_text},
                           {"composition", to_string(policy)},
                           {"max_tokens", options.max_tokens},
                           {"decode_prompt", options.decode_prompt},
                           {"prefill", to_json(prefill)},
                           {"prefill_chunk", flags.prefill_chunk},
                           {"engine", to_json(engine.options())},
                           {"graphs", to_string(flags.graphs)},
                           {"top_p", sampling.top_p},
                           {"top_k", sampling.top_k},
                           {"near", near},
                           {"session", options.session},
                           {"temperature", sampling.temperature},
                           {"seed", sampling.seed}}};
  report.extra = {{"text", text_of(generation, model)},
                  {"tokens", generation.tokens},
                  {"resumed_tokens", resumed_tokens},
                  {"graph_replays", runner->replays()}};
  report.tables.push_back(summary(generation, prompt.size(), policy, engine, session));
  std::string trace;
  if (sizes.largest.trace) {
    const PageLayout layout{
        .page_tokens = sizes.page_tokens, .head_dim = sizes.shape.head_dim, .dtype = sizes.kv_dtype};
    trace = log.tell(measured_rates(device.get(), layout.page_bytes(), sizes.threads), report.tables);
  }
  if (options.output.path.empty() && !json_on_stdout) {
    write_stderr(render(report, options.output.format));
    if (!trace.empty()) trace_target.commit(trace);
  } else {
    (void)deliver_beside(std::move(report), options.output.format, target, trace, trace_target);
  }
  return parked.failed() ? kFailed : kOk;
}

}  // namespace sluice::tools
