#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>

#include "sluice/error.hpp"
#include "sluice/runtime.hpp"
#include "tools/cli/bench.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/runtime_flags.hpp"
#include "tools/cli/stats_columns.hpp"
#include "tools/cli/values.hpp"
#include "tools/llama/sampler.hpp"

namespace sluice::tools {
namespace {

struct BenchDecodeOptions {
  std::string model;
  std::string random_weights = "llama-3.1-8b";
  std::string lengths = "32K,128K";
  std::string methods = "near@256/full:near=0;stream/full:near=0;hybrid/sluice";
  std::uint32_t steps = 16;
  std::uint32_t page_tokens = RuntimeOptions{}.page_tokens;
  std::uint32_t threads = 0;
  DeviceFlags device;
  OutputOptions output;
};

constexpr std::uint32_t kWarmUp = 4;
constexpr std::uint32_t kImportChunk = 4096;

/// A placement, maybe a page size of its own, and the policy that runs under it, e.g. `hybrid/sluice`, `near@256/full`.
struct Method {
  std::string name;
  std::uint32_t page_tokens = 0;  ///< 0: the command's
  PlacementMode placement{};
  PolicySpec policy;
};

/// Behind the @ of `near@256`; 0 without one.
std::uint32_t page_tokens_of(const std::string& placement) {
  const std::size_t at = placement.find('@');
  if (at == std::string::npos) return 0;
  const std::string what = "--methods: '" + placement + "'";
  return static_cast<std::uint32_t>(parse_count(placement.substr(at + 1), what, {.least = 8, .most = 256}));
}

std::vector<Method> parse_methods(const std::string& text) {
  std::vector<Method> methods;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(';', at), text.size());
    const std::string name = text.substr(at, end - at);
    const std::size_t slash = name.find('/');
    if (slash == std::string::npos) {
      throw Error(Errc::invalid_argument,
                  "--methods: '" + name + "' lacks its placement; write PLACEMENT/POLICY, e.g. hybrid/sluice");
    }
    const std::size_t at_sign = std::min(name.find('@'), slash);
    methods.push_back({.name = name,
                       .page_tokens = page_tokens_of(name.substr(0, slash)),
                       .placement = parse_placement(name.substr(0, at_sign)),
                       .policy = parse_policy(name.substr(slash + 1))});
    at = end + 1;
  }
  if (methods.empty())
    throw Error(Errc::invalid_argument, "--methods: the list is empty; name at least one, e.g. hybrid/sluice");
  return methods;
}

/// Random keys, values and queries in pinned memory. Every chunk of every layer starts at another place of one pool.
class RandomPrompt {
 public:
  RandomPrompt(Device& device, const AttentionShape& shape)
      : shape_(shape), pool_(device.allocate_pinned(kPoolElements * sizeof(std::uint16_t))) {
    auto* const out = reinterpret_cast<std::uint16_t*>(pool_->data());
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < kPoolElements; ++i) {
      const float value = normal(rng);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      out[i] = static_cast<std::uint16_t>(bits >> 16);  // Truncated to bf16: random is random.
    }
  }
  [[nodiscard]] TensorView rows(std::uint32_t salt, std::uint32_t tokens, std::uint32_t heads) const {
    const std::uint64_t elements = std::uint64_t{tokens} * heads * shape_.head_dim;
    const std::uint64_t places = (kPoolElements - elements) / shape_.head_dim;
    const std::byte* data =
        pool_->data() + std::uint64_t{salt} * 2'654'435'761u % places * shape_.head_dim * sizeof(std::uint16_t);
    return dense_view(data, DType::bf16, tokens, heads, shape_.head_dim);
  }

 private:
  static constexpr std::size_t kPoolElements = 24u << 20;
  AttentionShape shape_;
  std::unique_ptr<Buffer> pool_;
};

void import_random(Runtime& runtime, SequenceId id, const RandomPrompt& prompt, std::uint32_t tokens) {
  const AttentionShape& shape = runtime.options().shape;
  std::uint32_t salt = 0;
  for (std::uint32_t at = 0; at < tokens; at += kImportChunk) {
    const std::uint32_t count = std::min(kImportChunk, tokens - at);
    const std::uint32_t shown = at + count == tokens ? std::min(32u, count) : 0;
    for (LayerId layer{0}; layer.value < shape.layers; ++layer.value) {
      runtime.import_prefix({.sequence = id,
                             .layer = layer,
                             .k = prompt.rows(salt + 1, count, shape.kv_heads),
                             .v = prompt.rows(salt + 2, count, shape.kv_heads),
                             .last_q = prompt.rows(salt + 3, shown, shape.q_heads)});
      salt += 3;
    }
  }
}

struct Decoded {
  std::vector<double> token_ms;
  Stats stats;
};

Decoded decode(const Model& model, Runtime& runtime, const PolicySpec& policy, const RandomPrompt& prompt,
               std::uint32_t tokens, std::uint32_t steps) {
  const SequenceId id = runtime.begin(policy);
  import_random(runtime, id, prompt, tokens);
  Activations work;
  work.stream = &runtime.device_stream();
  work.timeout = runtime.options().timeout;
  std::vector<float> logits(model.config().vocab_size);
  Decoded result;
  int token = 1;
  for (std::uint32_t i = 0; i < kWarmUp + steps; ++i) {
    stop_if_interrupted();  // Nothing is queued here: the logits were waited for.
    const Clock::time_point begin = Clock::now();
    const PlacedToken placed{token, tokens + i};
    model.forward(
        std::span(&placed, 1),
        [&](const AttentionCall& call) {
          runtime.step({.layer = call.layer,
                        .sequences = std::span(&id, 1),
                        .q = call.q,
                        .k = call.k,
                        .v = call.v,
                        .out = call.out,
                        .ordered = true});
        },
        work);
    model.logits(work, 1, logits);
    token = argmax(logits);
    if (i >= kWarmUp)
      result.token_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  result.stats = runtime.stats(id);
  runtime.end(id);
  return result;
}

RuntimeOptions runtime_options(const BenchDecodeOptions& options, const AttentionShape& shape, const Method& method,
                               std::uint32_t tokens) {
  RuntimeFlags flags;
  flags.options.page_tokens = method.page_tokens != 0 ? method.page_tokens : options.page_tokens;
  flags.options.placement = method.placement;
  flags.options.threads = options.threads;
  flags.options.prefill_chunk = kImportChunk;
  return sized(flags, shape, std::span(&method.policy, 1), tokens + kWarmUp + options.steps);
}

int run(const BenchDecodeOptions& options) {
  const OutputTarget target(options.output.path);
  const std::vector<Method> methods = parse_methods(options.methods);
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  const std::shared_ptr<Device> device = make_device(options.device);
  if (!device) throw Error(Errc::invalid_argument, "bench decode: --device must be cuda or cuda:N");
  const Model model =
      load_model(options.model, options.model.empty() ? options.random_weights : "", options.threads, device);
  const AttentionShape shape = model.config().shape();
  const RandomPrompt prompt(*device, shape);
  Table table{.key = "decode", .title = "Time per output token, random prompt; " + std::string(kStatsNote)};
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  const auto measure = [&](std::uint32_t length) {
    std::optional<double> first;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      bar.update(m, methods.size(), std::to_string(length) + " tokens: " + methods[m].name);
      Runtime runtime(runtime_options(options, shape, methods[m], length), device);
      const Decoded decoded = decode(model, runtime, methods[m].policy, prompt, length, options.steps);
      const double p50 = percentile(decoded.token_ms, 0.5);
      if (!first) first = p50;
      std::vector<Column> columns = {{"length_tokens", "length"},          {"method", "method"},
                                     {"tpot_p50_ms", "ms/token", 2},       {"tpot_p95_ms", "p95", 2},
                                     {"speedup_over_first", "x first", 2}, {"near_pool_bytes", "near pool B"}};
      std::vector<Json> row = {
          length, methods[m].name, p50, percentile(decoded.token_ms, 0.95), *first / p50, runtime.options().near_bytes};
      append_stats(decoded.stats, shape, columns, row);
      table.columns = std::move(columns);
      table.rows.push_back(std::move(row));
    }
  };
  try {
    for (const std::uint32_t length : lengths) measure(length);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench decode",
                .config = {{"model", options.model},
                           {"random_weights", options.random_weights},
                           {"lengths", lengths},
                           {"methods", options.methods},
                           {"steps", options.steps},
                           {"page_tokens", options.page_tokens},
                           {"threads", options.threads},
                           {"device", device->info().name},
                           {"transfer", options.device.transfer}}};
  report.tables.push_back(std::move(table));
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
  command->add_option("--methods", options->methods, "Semicolon list of PLACEMENT[@PAGE_TOKENS]/POLICY; ratios are to the first")
      ->capture_default_str();
  add_count(*command, "--steps", options->steps, "Timed tokens", {.least = 1, .most = 4096});
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page", {.least = 8, .most = 256});
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "The prompt's keys and values are random numbers, imported without computing them; decoding is the model's own.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
