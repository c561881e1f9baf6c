#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#include "cpu/device/host_device.hpp"
#include "scheduler/prefill_auto.hpp"
#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "sluice/share_histogram.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/prefill_automatic.hpp"
#include "tools/cli/bench/prefill_check.hpp"
#include "tools/cli/bench/prefill_layer.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

struct BenchPrefillOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 1, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string lengths;                                                            ///< empty: the device's
  std::string structures = "vertical_slash,query_aware,uniform";
  std::string gammas = "0.9,0.95";
  FlexPrefillSpec flex;
  std::uint32_t chunk = 8192;
  std::uint32_t page_tokens = EngineOptions{}.page_tokens;
  DType dtype = EngineOptions{}.kv_dtype;
  std::uint32_t threads = 0;
  std::uint32_t repeat = 0;  ///< 0: the device's
  std::uint64_t seed = 0;
  DeviceFlags device;
  OutputOptions output;
};

/// Rows whose outputs are held against dense attention's.
constexpr std::uint32_t kComparedRows = 1024;

/// One length and structure, in device memory.
struct Prompt {
  const PrefillLayer& layer;
  const PrefillCheck& check;
  std::string name;  ///< for errors
};

/// Dense attention of a pass: what choices are held against.
struct Dense {
  double ms = 0.0;
  std::vector<std::uint32_t> compared;
  std::vector<float> lse;   ///< [tokens, q_heads]
  std::vector<float> rows;  ///< outputs of the tokens `compared`
  std::vector<Json> cells;
};

class PrefillBench {
 public:
  explicit PrefillBench(const BenchPrefillOptions& options)
      : options_(options),
        workers_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{.threads = options.threads})),
        device_(make_device(options.device)) {
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(workers_);
    stream_ = device_->create_stream("device");
    const bool host = !device_->info().own_processor;
    lengths_ = parse_counts(!options.lengths.empty() ? options.lengths
                            : host                   ? "2K,8K"
                                                     : "4K,16K,64K,128K,256K",
                            "--length");
    samples_ = options.repeat != 0 ? options.repeat : host ? 3 : 5;
    for (const std::string& gamma : split_list(options.gammas)) {
      PrefillSpec spec{.mode = PrefillMode::flexprefill, .flex = options.flex};
      spec.flex.gamma = parse_gamma(gamma, "--gammas");
      validate(spec);
      specs_.push_back(spec.flex);
    }
    for (const std::string& name : split_list(options.structures)) structures_.push_back(parse_prompt_structure(name));
    if (structures_.empty()) {
      throw Error(Errc::invalid_argument, "--structures: the list is empty; name at least one, e.g. vertical_slash");
    }
    make_table();
  }

  void run(ProgressBar& bar) {
    std::size_t done = 0;
    for (const PromptStructure structure : structures_) {
      for (const std::uint32_t length : lengths_) {
        const std::string name = std::string(to_string(structure)) + ", " + std::to_string(length) + " tokens";
        stop_if_interrupted();
        bar.update(done++, structures_.size() * lengths_.size(), name);
        run(structure, length, name);
      }
    }
  }

  [[nodiscard]] Table take() { return std::move(table_); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }
  [[nodiscard]] PrefillCosts costs() const noexcept { return device_->backend().prefill_costs(); }
  [[nodiscard]] std::uint32_t samples() const noexcept { return samples_; }
  [[nodiscard]] const std::vector<std::uint32_t>& lengths() const noexcept { return lengths_; }

 private:
  void make_table() {
    using Show = Column::Show;
    table_ = {.key = "prefill",
              .title =
                  "Attention of one layer of a prompt (median; ratios to dense in the same run; TFLOP/s of what "
                  "is computed; coverage: softmax mass that was attended, over rows and heads; error: L2, "
                  "relative to dense)",
              .columns = {{"structure", "structure"},
                          {"length_tokens", "length"},
                          {"chunk_tokens", "chunk"},
                          {"method", "method"},
                          {"total_ms", "ms", 3},
                          {"select_ms", "choice ms", 3},
                          {"attend_ms", "attention ms", 3},
                          {"tflops", "TFLOP/s", 2},
                          {"speedup_over_dense", "x dense", 2},
                          {"blocks_share", "blocks", 1, Show::percent},
                          {"coverage_mean", "coverage", 4},
                          {"coverage_p5", "p5", 3},
                          {"output_error", "error", 4},
                          {"query_aware_share", "query-aware", 1, Show::percent}}};
  }

  void run(PromptStructure structure, std::uint32_t length, const std::string& name) {
    const PrefillLayerOptions layer_options{
        .shape = options_.shape,
        .layout = {.page_tokens = options_.page_tokens, .head_dim = options_.shape.head_dim, .dtype = options_.dtype},
        .tokens = length,
        .structure = structure,
        .seed = options_.seed};
    for (const std::string& reason : device_->backend().unsupported_reasons(options_.shape, layer_options.layout)) {
      throw Error(Errc::unsupported, "bench prefill: " + reason);
    }
    const PrefillLayer layer(layer_options, *device_, *stream_, *workers_);
    const PrefillCheck check(layer, *device_, *stream_, *workers_);
    run({.layer = layer, .check = check, .name = name}, length);
    if (options_.chunk < length) run({.layer = layer, .check = check, .name = name}, options_.chunk);
  }

  void run(const Prompt& prompt, std::uint32_t chunk) {
    PrefillPass pass(prompt.layer, chunk, *device_, *stream_);
    pass.attend();
    prompt.check.require(pass, "dense attention, " + prompt.name);
    const std::uint32_t tokens = prompt.layer.options().tokens;
    Dense dense{.ms = 0.0, .compared = compared_rows(tokens), .lse = pass.lse(), .rows = {}, .cells = {}};
    dense.rows = pass.outputs(dense.compared);
    dense.ms = pass.time(samples_, [&] { pass.attend(); });
    const double rate = teraflops(std::uint64_t{tokens} * (tokens + 1) / 2, dense.ms);
    dense.cells = {dense.ms, nullptr, dense.ms, rate, 1.0, 1.0, 1.0, 1.0, 0.0, nullptr};
    add_row(prompt, chunk, "dense", dense.cells);
    for (const FlexPrefillSpec& spec : specs_) {
      const std::string name = to_text({.mode = PrefillMode::flexprefill, .flex = spec});
      pass.plan(std::vector<bool>(pass.chunks(), true));
      const std::vector<Json> cells = measure(prompt, pass, name, spec, dense);
      add_row(prompt, chunk, name, cells);
      add_row(prompt, chunk, to_text({.mode = PrefillMode::automatic, .flex = spec}),
              automatic(pass, dense.cells, cells));
    }
  }

  /// The row of `auto`, put together from those of dense attention and of a choice in every chunk: averages over the
  /// layers of a model, where every chunk has its share of the measured times by its work.
  std::vector<Json> automatic(const PrefillPass& pass, const std::vector<Json>& dense,
                              const std::vector<Json>& chosen) {
    const std::vector<double> shares = automatic_shares(pass, options_.shape.q_heads, options_.shape.layers, costs());
    double all = 0.0, by_choice = 0.0, blocks = 0.0, attended = 0.0;
    for (std::size_t c = 0; c < shares.size(); ++c) {
      const scheduler::ChunkWork work{.first = pass.first(c), .count = pass.keys(c) - pass.first(c)};
      all += work.pairs();
      attended += shares[c] * work.pairs();
      blocks += work.key_blocks();
      by_choice += shares[c] * work.key_blocks();
    }
    attended /= all;
    by_choice /= blocks;
    const auto mixed = [&](std::size_t cell) {
      return attended * chosen[cell].get<double>() + (1.0 - attended) * dense[cell].get<double>();
    };
    const double choice_ms = by_choice * chosen[1].get<double>();
    const double total_ms = choice_ms + mixed(2);
    return {total_ms, choice_ms, mixed(2), nullptr, dense[0].get<double>() / total_ms,
            mixed(5), mixed(6),  nullptr,  nullptr, chosen[9]};
  }

  /// A row's cells for what the pass plans.
  std::vector<Json> measure(const Prompt& prompt, PrefillPass& pass, const std::string& name,
                            const FlexPrefillSpec& spec, const Dense& dense) {
    pass.choose(spec);
    pass.attend();
    prompt.check.require(pass, name + ", " + prompt.name);
    const ShareHistogram coverage = coverage_of(pass.lse(), dense.lse);
    const double error = relative_error(pass.outputs(dense.compared), dense.rows);
    std::uint64_t kept = 0, causal = 0, query_aware = 0, heads = 0;
    const std::vector<PrefillChoice> choices = pass.choices();
    for (std::size_t i = 0; i < choices.size(); ++i) {
      const bool chosen = pass.chooses(i / options_.shape.q_heads);
      kept += chosen ? choices[i].kept : choices[i].causal;
      causal += choices[i].causal;
      query_aware += chosen ? choices[i].query_aware : 0;
      heads += chosen ? 1 : 0;
    }
    const double choice_ms = pass.time(samples_, [&] { pass.choose(spec); });
    const double attend_ms = pass.time(samples_, [&] { pass.attend(); });
    // Every row computes about half of the block on the diagonal, and all of the others that it keeps.
    const std::uint64_t diagonal = prompt.layer.options().tokens * std::uint64_t{kPrefillBlock - 1} / 2;
    const std::uint64_t pairs = kept * kPrefillBlock * kPrefillBlock / options_.shape.q_heads - diagonal;
    return {choice_ms + attend_ms,
            choice_ms,
            attend_ms,
            teraflops(pairs, attend_ms),
            dense.ms / (choice_ms + attend_ms),
            static_cast<double>(kept) / static_cast<double>(causal),
            coverage.mean(),
            coverage.percentile(0.05),
            error,
            static_cast<double>(query_aware) / static_cast<double>(heads)};
  }

  /// Rate for so many (query, key) pairs in every query head.
  [[nodiscard]] double teraflops(std::uint64_t pairs, double ms) const {
    return 4.0 * options_.shape.head_dim * options_.shape.q_heads * static_cast<double>(pairs) / ms * 1e-9;
  }

  [[nodiscard]] static std::vector<std::uint32_t> compared_rows(std::uint32_t tokens) {
    const std::uint32_t count = std::min(tokens, kComparedRows);
    std::vector<std::uint32_t> rows;
    for (std::uint64_t i = 0; i < count; ++i) rows.push_back(static_cast<std::uint32_t>((i + 1) * tokens / count - 1));
    return rows;
  }

  [[nodiscard]] static ShareHistogram coverage_of(const std::vector<float>& lse, const std::vector<float>& all) {
    ShareHistogram coverage;
    for (std::size_t i = 0; i < lse.size(); ++i) coverage.add(std::min(1.0, std::exp(double{lse[i]} - all[i])));
    return coverage;
  }

  void add_row(const Prompt& prompt, std::uint32_t chunk, const std::string& method, const std::vector<Json>& cells) {
    std::vector<Json> row = {to_string(prompt.layer.options().structure), prompt.layer.options().tokens, chunk, method};
    row.insert(row.end(), cells.begin(), cells.end());
    table_.rows.push_back(std::move(row));
  }

  const BenchPrefillOptions& options_;
  cpu::Topology topology_;
  std::shared_ptr<const cpu::Workers> workers_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::uint32_t> lengths_;
  std::uint32_t samples_ = 0;
  std::vector<FlexPrefillSpec> specs_;
  std::vector<PromptStructure> structures_;
  Table table_;
};

int run(BenchPrefillOptions options) {
  AttentionShape shape = named_shape(options.shape_name);
  if (options.shape.q_heads != 0) shape.q_heads = options.shape.q_heads;
  if (options.shape.kv_heads != 0) shape.kv_heads = options.shape.kv_heads;
  if (options.shape.head_dim != 0) shape.head_dim = options.shape.head_dim;
  validate(shape);
  options.shape = shape;
  const OutputTarget target(options.output.path);
  PrefillBench bench(options);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    bench.run(bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench prefill",
                .config = {{"shape", options.shape_name},
                           {"q_heads", shape.q_heads},
                           {"kv_heads", shape.kv_heads},
                           {"head_dim", shape.head_dim},
                           {"lengths", bench.lengths()},
                           {"structures", split_list(options.structures)},
                           {"gammas", split_list(options.gammas)},
                           {"tau", options.flex.tau},
                           {"min_budget", options.flex.min_budget},
                           {"chunk", options.chunk},
                           {"layers", shape.layers},
                           {"page_tokens", options.page_tokens},
                           {"dtype", to_string(options.dtype)},
                           {"threads", options.threads},
                           {"repeat", bench.samples()},
                           {"seed", options.seed},
                           {"device", bench.device().name}}};
  report.tables.push_back(bench.take());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_prefill(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchPrefillOptions>();
  auto* command = bench.add_subcommand("prefill", "Attention of one layer of a prompt: dense, and by FlexPrefill");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  command->add_option("--length", options->lengths,
                      "Comma list of prompt lengths in tokens, K allowed [default: 2K,8K on the host, "
                      "4K,16K,64K,128K,256K on a GPU]");
  command
      ->add_option("--structures", options->structures,
                   "Comma list of vertical_slash, query_aware, uniform (the worst)")
      ->capture_default_str();
  command->add_option("--gammas", options->gammas, "Comma list of FlexPrefill's gamma; \"\": dense attention alone")
      ->capture_default_str();
  add_flexprefill_flags(*command, options->flex);
  add_count(*command, "--chunk", options->chunk, "Longer prompts are also attended in chunks of so many tokens",
            {.least = 1, .most = 1 << 20});
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page", {.least = 8, .most = 256});
  add_dtype(*command, "--dtype", options->dtype, "Element type of queries, keys, values and outputs");
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_count(*command, "--repeat", options->repeat, "Samples of every time [default: 3 on the host, 5 on a GPU]",
            {.least = 1, .most = 1000})
      ->default_str("");
  add_seed(*command, options->seed, "Seed of the synthetic prompts");
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Rows of every attention are checked against float64 before it is timed; a wrong one ends the run with exit\n"
      "code 1. The rows of auto are no measurements of their own: they are put together from those above them by what\n"
      "the rule would do in a model of the shape's layers, all like this one. Values are noise, so that the error is "
      "that of the hardest case.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
