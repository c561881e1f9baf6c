// `sluice bench decode`: time per token of a whole model, its attention by an Engine, against dense attention in device
// memory.
#include <algorithm>
#include <memory>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/decode_attention.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/sampler.hpp"

namespace sluice::tools {
namespace {

struct BenchDecodeOptions {
  std::string model;
  std::string random_weights = "llama-3.1-8b";
  std::string lengths = "32K,128K";
  std::string methods = "dense;hybrid/sluice;stream/sluice";
  std::string near = "5%";
  std::string far;
  FetchShare fetch_share;
  DType kv_dtype = DType::bf16;
  std::uint32_t steps = 16;
  std::uint32_t warm_up = 16;
  std::uint32_t threads = 0;
  std::uint32_t drafts = 1;
  DeviceFlags device;
  OutputOptions output;
};

std::string to_string(const Verified& verified) {
  if (verified.rows == 1) return "1 token";
  return std::to_string(verified.rows) + (verified.drafts == 1 ? " one by one" : " together");
}

/// A placement and the policy that runs under it, e.g. `hybrid/sluice`; or `dense`: everything in device memory.
struct Method {
  std::string name;
  bool dense = false;
  PlacementMode placement{};
  PolicySpec policy;
};

/// What is timed: one token and, if drafts are asked for, as many new tokens one by one, if the policy takes them so,
/// and together.
std::vector<Verified> timed(const BenchDecodeOptions& options, const Method& method) {
  if (options.drafts == 1 || method.dense) return {{}};
  const Verified together{.rows = options.drafts, .drafts = options.drafts};
  if (scheduler::chooser(method.policy) == scheduler::Chooser::cpu) return {{}, together};
  return {{}, {.rows = options.drafts}, together};
}

Method parse_method(const std::string& name) {
  if (name == "dense") return {.name = name, .dense = true, .placement = {}, .policy = {}};
  const std::size_t slash = name.find('/');
  if (slash == std::string::npos)
    throw Error(Errc::invalid_argument,
                "--methods: '" + name + "' lacks its placement; write dense or PLACEMENT/POLICY, e.g. hybrid/sluice");
  return {.name = name,
          .placement = parse_placement(name.substr(0, slash)),
          .policy = parse_policy(name.substr(slash + 1))};
}

std::vector<Method> parse_methods(const std::string& text) {
  std::vector<Method> methods;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(';', at), text.size());
    methods.push_back(parse_method(text.substr(at, end - at)));
    at = end + 1;
  }
  if (methods.empty())
    throw Error(Errc::invalid_argument, "--methods: the list is empty; name at least one, e.g. hybrid/sluice");
  return methods;
}

class DecodeBench {
 public:
  DecodeBench(const BenchDecodeOptions& options, std::shared_ptr<Device> device)
      : options_(options),
        device_(std::move(device)),
        model_(load_model(options.model, options.model.empty() ? options.random_weights : "", options.threads, device_)),
        shape_(model_.config().shape()),
        prompt_(*device_, shape_),
        stream_(device_->create_stream("bench")),
        near_(parse_share(options.near, "--near")) {
    table_ = {.key = "decode",
              .title = std::string("Time per ") + (options.drafts == 1 ? "output token" : "forward") +
                       " behind a random prompt; " + kDecodeNote,
              .columns = {},
              .rows = {}};
  }

  void run(std::uint32_t length, const std::vector<Method>& methods, ProgressBar& bar) {
    std::optional<double> first;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      bar.update(m, methods.size(), std::to_string(length) + " tokens: " + methods[m].name);
      const Method method = limited(length, methods[m]);
      for (const Verified& verified : timed(options_, method)) run(length, method, verified, first);
    }
  }
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  /// With the budget of far tokens that --far says, at this length.
  [[nodiscard]] Method limited(std::uint32_t length, const Method& method) {
    if (method.dense || options_.far.empty()) return method;
    const FarPlace place{.shape = shape_,
                         .kv_dtype = options_.kv_dtype,
                         .placement = method.placement,
                         .page_tokens = page_tokens_for(method.policy, EngineFlags{}),
                         .tokens = length,
                         .near_hits = usual_near_hits(near_)};
    const std::size_t policy = method.name.find('/') + 1;
    return parse_method(method.name.substr(0, policy) + with_far(method.name.substr(policy), options_.far, place, [&] {
                          const PageLayout layout{.head_dim = shape_.head_dim, .dtype = options_.kv_dtype};
                          if (!rates_) rates_ = measured_rates(device_.get(), layout.page_bytes(), options_.threads);
                          return *rates_;
                        }));
  }

  [[nodiscard]] EngineOptions sizes(const Method& method, std::uint32_t length, const Verified& verified) const {
    EngineFlags flags;
    flags.placement = method.placement;
    flags.fetch_share.share = share_for(method.placement, options_.fetch_share);
    flags.kv_dtype = options_.kv_dtype;
    flags.threads = options_.threads;
    flags.prefill_chunk = 1;
    EngineOptions sizes = sized(flags, shape_, {&method.policy, 1},
                                {.page_tokens = page_tokens_for(method.policy, flags),
                                 .tokens = length + options_.warm_up + options_.steps + verified.rows,
                                 .near = near_});
    sizes.largest.decode_rows = verified.rows;
    sizes.largest.drafts = verified.drafts;
    sizes.import_rows = std::min(kImportChunk, length);
    return sizes;
  }

  void run(std::uint32_t length, const Method& method, const Verified& verified, std::optional<double>& first) {
    DecodeScore score;
    std::vector<double> token_ms;
    std::uint64_t device_bytes = 0;
    PageLayout layout{.page_tokens = 16, .head_dim = shape_.head_dim, .dtype = DType::bf16};
    if (method.dense) {
      DenseAttention attention(shape_, prompt_, length, options_.warm_up + options_.steps, *device_, *stream_);
      (void)decode(attention, length, options_.warm_up, verified.rows);
      token_ms = decode(attention, length + options_.warm_up, options_.steps, verified.rows);
    } else {
      EngineAttention attention(sizes(method, length, verified), method.policy, prompt_, length, device_, *stream_);
      layout.page_tokens = attention.engine().options().page_tokens;
      layout.dtype = options_.kv_dtype;
      (void)decode(attention, length, options_.warm_up, verified.rows);
      const EngineStats before = attention.engine().stats();
      token_ms = decode(attention, length + options_.warm_up, options_.steps, verified.rows);
      score.stats = since(before, attention.engine().stats());
      score.tokens = options_.steps;
      for (std::uint32_t i = 0; i < options_.steps; ++i)
        score.dense_tokens += length + options_.warm_up + i + verified.rows;
      device_bytes = attention.engine().memory().device();
    }
    const double p50 = percentile(token_ms, 0.5);
    if (!first) first = p50;
    const bool drafts = options_.drafts != 1;
    std::vector<Column> columns = {{"length_tokens", "length"},
                                   {"method", "method"},
                                   {drafts ? "forward_p50_ms" : "tpot_p50_ms", drafts ? "ms/forward" : "ms/token", 2},
                                   {drafts ? "forward_p95_ms" : "tpot_p95_ms", "p95", 2},
                                   {"speedup_over_first", "x first", 2},
                                   {"device_bytes", "device B"}};
    std::vector<Json> row = {length,
                             drafts ? method.name + ", " + to_string(verified) : method.name,
                             p50,
                             percentile(token_ms, 0.95),
                             *first / p50,
                             method.dense ? Json() : Json(device_bytes)};
    append_decode(score, shape_, layout, columns, row);
    table_.columns = std::move(columns);
    table_.rows.push_back(std::move(row));
  }

  /// Milliseconds of each forward, of `rows` new tokens of which the first stays.
  std::vector<double> decode(Attention& attention, std::uint32_t position, std::uint32_t steps, std::uint32_t rows) {
    Activations work;
    work.stream = stream_.get();
    work.timeout = std::chrono::minutes(2);
    const std::uint32_t vocabulary = model_.config().vocab_size;
    std::vector<float> logits(std::size_t{rows} * vocabulary);
    std::vector<PlacedToken> placed(rows);
    std::vector<double> token_ms;
    for (std::uint32_t i = 0; i < steps; ++i) {
      stop_if_interrupted();  // Nothing is queued here: the logits were waited for.
      const Clock::time_point begin = Clock::now();
      for (std::uint32_t r = 0; r < rows; ++r)
        placed[r] = {static_cast<int>((static_cast<std::uint32_t>(token_) + r) % vocabulary), position + i + r};
      attention.begin();
      model_.forward(placed, [&](const AttentionCall& call) { attention.attend(call); }, work);
      attention.end(position + i + 1);
      model_.logits(work, rows, logits);
      token_ = argmax(std::span(logits).first(vocabulary));
      token_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    }
    return token_ms;
  }

  const BenchDecodeOptions& options_;
  std::shared_ptr<Device> device_;
  Model model_;
  AttentionShape shape_;
  RandomPrompt prompt_;
  std::unique_ptr<Stream> stream_;
  double near_;
  std::optional<scheduler::LaneRates> rates_;  ///< measured once they are asked for
  int token_ = 1;
  Table table_;
};

int run(BenchDecodeOptions& options) {
  const OutputTarget target(options.output.path);
  const std::vector<Method> methods = parse_methods(options.methods);
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  (void)parse_share(options.near, "--near");
  for (const Method& method : methods)  // Refused before anything is built.
    if (!method.dense && options.far != "auto")
      (void)with_far(method.name.substr(method.name.find('/') + 1), options.far, {}, {});
  const std::shared_ptr<Device> device = make_device(options.device);
  if (!device) throw Error(Errc::invalid_argument, "bench decode: --device must be cuda or cuda:N");
  advise(options.fetch_share, device.get(), options.threads);
  DecodeBench bench(options, device);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    for (const std::uint32_t length : lengths) bench.run(length, methods, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench decode",
                .config = {{"model", options.model},
                           {"random_weights", options.random_weights},
                           {"lengths", lengths},
                           {"methods", options.methods},
                           {"near", options.near},
                           {"far", options.far},
                           {"fetch_share", options.fetch_share.share},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"drafts", options.drafts},
                           {"threads", options.threads},
                           {"device", device->info().name},
                           {"transfer", options.device.transfer}}};
  report.tables.push_back(bench.take());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_decode(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchDecodeOptions>();
  options->device.device = "cuda";
  auto* command = bench.add_subcommand("decode", "Time per token of a whole model on the GPU, by placement and policy");
  command->add_option("--model", options->model, "Hugging Face directory [default: --random-weights]")
      ->type_name("DIR");
  command->add_option("--random-weights", options->random_weights, "A known shape with random weights")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--length", options->lengths, "Comma list of prompt lengths in tokens, K allowed")
      ->capture_default_str();
  command
      ->add_option("--methods", options->methods,
                   "Semicolon list of dense (everything in device memory) and PLACEMENT/POLICY; ratios are to the first")
      ->capture_default_str();
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->type_name("SHARE")
      ->capture_default_str();
  add_far(*command, options->far);
  add_fetch_share(*command, options->fetch_share);
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  add_count(*command, "--steps", options->steps, "Timed tokens", {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Tokens before those", {.most = 4096});
  add_count(*command, "--drafts", options->drafts,
            "Also forwards of as many new tokens of a sequence, one of which stays: one by one, and together",
            {.least = 1, .most = kMostGroup});
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "The prompt's keys and values are random numbers, imported without computing them; decoding is the model's own,\n"
      "enqueued layer by layer. With --drafts times are of forwards, which accept one token of those that they verify.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
