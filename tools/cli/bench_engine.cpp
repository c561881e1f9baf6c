// `sluice bench engine`: forwards of an Engine against dense attention in device memory.
#include <algorithm>
#include <memory>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench.hpp"
#include "tools/cli/bench_device.hpp"
#include "tools/cli/bench_graph.hpp"
#include "tools/cli/bench_shapes.hpp"
#include "tools/cli/synthetic_forwards.hpp"
#include "tools/cli/values.hpp"

namespace sluice::tools {
namespace {

struct BenchEngineOptions {
  std::string shape_name = "llama-3.1-8b";
  std::string lengths = "8K,32K,128K";
  std::string policy = "exact | int4 | top_k=max(64, 1%) | near=0,sinks=4,recent=128";
  std::string placement = "hybrid";
  std::string pattern = "structured";
  std::uint32_t rows = 1;
  std::uint32_t layers = 4;
  std::uint32_t threads = 0;
  std::uint32_t steps = 32;
  std::uint32_t warm_up = 64;
  std::uint32_t promotions = EngineOptions{}.promotions;
  double near_share = 0.05;
  std::uint64_t seed = 0;
  DeviceFlags device;
  OutputOptions output;
};

constexpr std::uint32_t kDensePageTokens = 256;
constexpr double kTolerance = 1e-2;

class EngineBench {
 public:
  EngineBench(const BenchEngineOptions& options, const AttentionShape& shape)
      : options_(options),
        shape_(shape),
        device_(make_device(options.device)),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})) {
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
    table_ = {.key = "engine",
              .title = "Forwards of an engine per layer (median; dense: as many launches as rows, in HBM, same run)",
              .columns = {{"length_tokens", "length"},
                          {"rows", "rows"},
                          {"mode", "mode"},
                          {"layer_us", "us/layer", 1},
                          {"layer_p95_us", "p95", 1},
                          {"calling_us", "calling", 1},
                          {"waited_us", "waited", 1},
                          {"answer_us", "answer", 1},
                          {"dense_us", "dense", 1},
                          {"speedup_over_dense", "x dense", 2},
                          {"near_share", "near", 2, Column::Show::percent},
                          {"far_share", "far", 2, Column::Show::percent},
                          {"fetched_share", "fetched", 2, Column::Show::percent},
                          {"promoted", "promoted", 1},
                          {"error", "error", 4}}};
  }

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, 3, std::to_string(length) + " tokens: building");
    SyntheticOptions synthetic{.shape = shape_,
                               .layout = {.head_dim = shape_.head_dim, .dtype = DType::bf16},
                               .tokens = length,
                               .steps = options_.warm_up + options_.steps,
                               .prompt_queries = std::min(32u, length)};
    synthetic.pattern = parse_pattern(options_.pattern);
    synthetic.seed = options_.seed;
    const SyntheticLayer layer(synthetic, topology_, builders_);
    const DeviceSteps steps(layer, *device_);
    DenseOnDevice dense(layer, steps, *device_, kDensePageTokens);
    const std::vector<float> want = dense.attend(0);
    const double dense_us = percentile(dense.time(9), 0.5) * options_.rows;
    check(layer, steps, want, length);
    for (const bool graph : {false, true}) {
      if (graph && !can_capture(*device_)) continue;
      bar.update(graph ? 2 : 1, 3, std::to_string(length) + " tokens: " + (graph ? "graph" : "enqueued"));
      SyntheticForwards forwards(forwards_of(options_.policy), layer, steps, device_);
      (void)forwards.time(options_.warm_up, graph);
      const EngineStats before = forwards.engine().stats();
      std::vector<double> calling;
      const std::vector<double> us = forwards.time(options_.steps, graph, &calling);
      const EngineStats after = forwards.engine().stats();
      add_row(length, graph, us, calling, dense_us, before, after);
    }
  }
  [[nodiscard]] Table take() { return std::move(table_); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }

 private:
  /// Everything chosen must be dense attention; what the policy's choice is off by is a result.
  void check(const SyntheticLayer& layer, const DeviceSteps& steps, const std::vector<float>& want,
             std::uint32_t length) {
    SyntheticForwards whole(forwards_of("exact | int4 | top_k=all | near=0,sinks=4,recent=128"), layer, steps, device_);
    error_ = relative_error(first_out(whole), want);
    if (!(error_ <= kTolerance))
      throw Error(Errc::device, "bench engine: dense attention of " + std::to_string(length) +
                                    " tokens is wrong (relative error " + std::to_string(error_) +
                                    "); nothing of it was timed");
    SyntheticForwards chosen(forwards_of(options_.policy), layer, steps, device_);
    error_ = relative_error(first_out(chosen), want);
  }

  static std::vector<float> first_out(SyntheticForwards& forwards) {
    (void)forwards.time(1);
    return forwards.out();
  }

  [[nodiscard]] SyntheticForwardsOptions forwards_of(const std::string& policy) const {
    return {.policy = parse_policy(policy),
            .rows = options_.rows,
            .layers = options_.layers,
            .near_share = options_.near_share,
            .placement = parse_placement(options_.placement),
            .threads = options_.threads,
            .promotions = options_.promotions};
  }

  void add_row(std::uint32_t length, bool graph, const std::vector<double>& us, const std::vector<double>& calling,
               double dense_us, const EngineStats& before, const EngineStats& after) {
    const double layers = static_cast<double>(options_.steps) * options_.layers;
    const double all = layers * options_.rows * shape_.kv_heads * (length + options_.warm_up + 0.5 * options_.steps);
    const auto per_layer_us = [&](std::uint64_t ns) { return 1e-3 * static_cast<double>(ns) / layers; };
    const double median = percentile(us, 0.5);
    table_.rows.push_back({length, options_.rows, graph ? "graph" : "enqueued", median, percentile(us, 0.95),
                           percentile(calling, 0.5), per_layer_us(after.waited_ns - before.waited_ns),
                           per_layer_us(after.answer_ns - before.answer_ns), dense_us, dense_us / median,
                           static_cast<double>(after.near_tokens - before.near_tokens) / all,
                           static_cast<double>(after.far_tokens - before.far_tokens) / all,
                           static_cast<double>(after.fetched_tokens - before.fetched_tokens) / all,
                           static_cast<double>(after.promoted - before.promoted) / (layers * shape_.kv_heads), error_});
  }

  const BenchEngineOptions& options_;
  AttentionShape shape_;
  cpu::Topology topology_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const cpu::Workers> builders_;
  double error_ = 0.0;
  Table table_;
};

int run(const BenchEngineOptions& options) {
  (void)parse_pattern(options.pattern);
  (void)parse_policy(options.policy);
  (void)parse_placement(options.placement);
  const AttentionShape shape = named_shape(options.shape_name);
  const OutputTarget target(options.output.path);
  Report report{.command = "bench engine",
                .config = {{"shape", options.shape_name},
                           {"lengths", parse_counts(options.lengths, "--length")},
                           {"policy", options.policy},
                           {"placement", options.placement},
                           {"pattern", options.pattern},
                           {"rows", options.rows},
                           {"layers", options.layers},
                           {"threads", options.threads},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"promotions", options.promotions},
                           {"near", options.near_share},
                           {"seed", options.seed}}};
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  EngineBench bench(options, shape);
  report.config["device"] = bench.device().name;
  try {
    for (const std::uint32_t length : parse_counts(options.lengths, "--length")) bench.run(length, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  report.tables.push_back(bench.take());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_engine(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchEngineOptions>();
  options->device.device = "cuda";
  auto* command =
      bench.add_subcommand("engine", "Forwards that are planned once, enqueued or replayed as a CUDA graph");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  command->add_option("--policy", options->policy, "A policy that the engine serves")->capture_default_str();
  command->add_option("--placement", options->placement, "Who attends what is chosen and not near: hybrid or stream")
      ->capture_default_str();
  command->add_option("--pattern", options->pattern, "Attention: structured (heavy tokens, slashes) or uniform (noise)")
      ->capture_default_str();
  add_count(*command, "--rows", options->rows, "Sequences of a forward", {.least = 1, .most = 64});
  add_count(*command, "--layers", options->layers, "Layers of a forward", {.least = 1, .most = 256});
  add_count(*command, "--threads", options->threads, "Threads that answer the far part; 0: the cores less one",
            {.most = 4096});
  add_count(*command, "--steps", options->steps, "Timed forwards; times are medians over them",
            {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Forwards before those, in which tokens come near",
            {.most = 4096});
  add_count(*command, "--promotions", options->promotions, "Tokens of a KV head that a forward brings near, at most",
            {.most = kMostPromotions});
  command->add_option("--near", options->near_share, "Share of the pages that device memory has room for")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  add_seed(*command, options->seed, "Seed of the synthetic layer");
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Every layer of every sequence is the same synthetic layer, in memory of its own. With every token chosen the\n"
      "engine must give dense attention before anything is timed. A time is from the plan until the forward is known\n"
      "to have ended, divided by the layers; `calling` is the part of it in which the calling thread works, `waited` "
      "that\n"
      "in which the device waits for the CPU, `answer` what the CPU takes from seeing a question to its answer, and\n"
      "`promoted` tokens brought near per forward, layer and KV head. No step comes twice.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
