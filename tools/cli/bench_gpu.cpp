#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "sluice/error.hpp"
#include "sluice/trace.hpp"
#include "tools/cli/bench.hpp"
#include "tools/cli/bench_device.hpp"
#include "tools/cli/bench_shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/progress_bar.hpp"
#include "tools/cli/runtime_flags.hpp"
#include "tools/cli/values.hpp"

namespace sluice::tools {
namespace {

struct BenchGpuOptions {
  std::string shape_name = "llama-3.1-8b";
  std::string lengths = "4K,16K,32K,64K,128K,256K,512K";
  std::string policies = "topk,lfps,sluice";
  std::string placements = "hybrid,stream,auto";
  std::string pattern = "structured";
  std::vector<double> sinks;
  std::uint32_t layers = 4;
  std::uint32_t page_tokens = RuntimeOptions{}.page_tokens;
  std::uint32_t dense_page_tokens = 256;
  std::uint32_t threads = 0;
  std::uint32_t steps = 24;
  std::uint32_t audited_steps = 4;
  std::uint64_t seed = 0;
  bool dense_only = false;
  std::string sections = "attention,kernels";
  DeviceFlags device;
  OutputOptions output;
};

/// Dense attention, nothing near beyond what must be.
constexpr const char* kEverything = "full:near=0";
constexpr std::uint32_t kWarmUp = 6;
constexpr std::uint32_t kTracedSteps = 16;
constexpr std::uint32_t kImportChunk = 4096;
/// Relative error (L2 over all heads) that a correct result stays below: weights are rounded to bf16 on the device.
constexpr double kTolerance = 1e-2;

void require_close(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  const double error = relative_error(got, want);
  if (error <= kTolerance) return;  // NaN fails too.
  throw Error(Errc::device, "bench gpu: " + what + " is wrong (relative error " + std::to_string(error) +
                                "); nothing of it was timed");
}

/// Median length of every node, from a trace.
class NodeTimes final : public TraceSink {
 public:
  void record(const TraceEvent& event) noexcept override {
    try {
      const std::scoped_lock lock(mutex_);
      times_[event.name].push_back(static_cast<double>(event.end_ns - event.begin_ns) * 1e-3);
    } catch (const std::bad_alloc&) {
    }  // One sample fewer.
  }
  [[nodiscard]] Json median(const std::string& node) const {
    const auto at = times_.find(node);
    return at == times_.end() ? Json() : Json(percentile(at->second, 0.5));
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> times_;
};

constexpr const char* kNodes[] = {"append", "rank_pages", "hand_over",      "attend_near", "write_through", "select",
                                  "place",  "fetch",      "attend_fetched", "progress",    "attend_far",    "merge",   "observe"};

class GpuBench {
 public:
  GpuBench(const BenchGpuOptions& options, AttentionShape shape)
      : options_(options),
        shape_(shape),
        device_(make_device(options.device)),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})) {
    // Without a GPU the same steps run on the embedded device: for trying the command out, not for its times.
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
    shape_.layers = options.layers;
    make_table();
  }

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, 1, std::to_string(length) + " tokens: building");
    SyntheticOptions synthetic{
        .shape = shape_,
        .layout = {.page_tokens = options_.page_tokens, .head_dim = shape_.head_dim, .dtype = DType::bf16},
        .tokens = length,
        .steps = kWarmUp + options_.steps,
        .prompt_queries = std::min(32u, length)};
    synthetic.pattern = parse_pattern(options_.pattern);
    synthetic.sinks = options_.sinks;
    synthetic.seed = options_.seed;
    const SyntheticLayer layer(synthetic, topology_, builders_);
    const DeviceSteps steps(layer, *device_);
    time_dense(layer, steps, length);
    if (options_.dense_only) return;
    const PolicySpec everything = parse_policy(kEverything);
    time_policies(layer, steps, PlacementMode::stream, {{"full", everything}}, true, bar);
    for (const std::string& name : split_list(options_.placements)) {
      const PlacementMode placement = parse_placement(name);
      std::vector<Named> policies;
      for (const std::string& text : split_policies(options_.policies)) {
        PolicySpec spec = parse_policy(text);
        spec.dense_layers = spec.dense_every = 0;  // What is timed is a layer that the policy works in.
        // The oracle reads every key on the CPU wherever its choice is attended: once is enough.
        if (!spec.uses(Source::exact) || placement == PlacementMode::hybrid) policies.push_back({text, spec});
      }
      time_policies(layer, steps, placement, policies, false, bar);
    }
  }

  [[nodiscard]] Table take() { return std::move(table_); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }

 private:
  struct Named {
    std::string name;
    PolicySpec spec;
  };

  void make_table() {
    using Show = Column::Show;
    table_ = {.key = "attention",
              .title =
                  "Decode attention per layer, KV in host memory (median; ratios to dense in HBM and to streaming "
                  "everything, same run)",
              .columns = {{"length_tokens", "length"},
                          {"method", "method"},
                          {"placement", "placement"},
                          {"layer_us", "us/layer", 1},
                          {"layer_p95_us", "p95", 1},
                          {"speedup_over_dense", "x dense", 2},
                          {"speedup_over_stream", "x stream", 2},
                          {"coverage_mean", "coverage", 4},
                          {"coverage_p5", "p5", 4},
                          {"near_share", "near", 1, Show::percent},
                          {"far_share", "far", 1, Show::percent},
                          {"link_bytes_per_layer", "link B/layer"},
                          {"device_wait_us", "waiting", 1}}};
    for (const char* node : kNodes) table_.columns.push_back({std::string(node) + "_us", node, 1});
  }

  void time_dense(const SyntheticLayer& layer, const DeviceSteps& steps, std::uint32_t length) {
    DenseOnDevice dense(layer, steps, *device_, options_.dense_page_tokens);
    want_ = dense.attend(0);
    dense_us_ = percentile(dense.time(9), 0.5);
    stream_us_.reset();
    const double bytes = 2.0 * static_cast<double>(layer.options().layout.row_bytes()) * shape_.kv_heads * length;
    std::vector<Json> row = {length, "dense in HBM", nullptr, dense_us_, nullptr, 1.0, nullptr, 1.0, 1.0, 1.0,
                             0.0,    nullptr};
    row.resize(table_.columns.size());
    table_.rows.push_back(std::move(row));
    table_.title +=
        "; dense at " + std::to_string(length) + ": " + std::to_string(std::lround(bytes / dense_us_ * 1e-3)) + " GB/s";
  }

  RuntimeOptions runtime_options(const SyntheticLayer& layer, PlacementMode placement,
                                 const std::vector<Named>& policies) {
    RuntimeFlags flags;
    flags.options.page_tokens = options_.page_tokens;
    flags.options.placement = placement;
    flags.options.threads = options_.threads;
    flags.options.prefill_chunk = kImportChunk;
    std::vector<PolicySpec> specs = {parse_policy(kEverything)};
    for (const Named& policy : policies) specs.push_back(policy.spec);
    return sized(flags, shape_, specs, layer.options().tokens + layer.options().steps);
  }

  void time_policies(const SyntheticLayer& layer, const DeviceSteps& steps, PlacementMode placement,
                     const std::vector<Named>& policies, bool baseline, ProgressBar& bar) {
    if (policies.empty()) return;
    RuntimeOptions options = runtime_options(layer, placement, policies);
    std::vector<StepTimes> times;
    {
      DeviceDecode decode(options, layer, steps, device_);
      check_dense(decode, placement);
      for (const Named& policy : policies) {
        bar.update(times.size(), policies.size(),
                   std::to_string(layer.options().tokens) + " tokens: " + policy.name + ' ' + to_string(placement));
        times.push_back(
            decode.run(policy.spec, kWarmUp,
                       policy.spec.uses(Source::exact) || baseline ? std::min(6u, options_.steps) : options_.steps));
      }
    }
    // Apart: an audit reads everything and leaves cold caches to the nodes' times.
    std::vector<NodeTimes> nodes(policies.size());
    for (std::size_t i = 0; i < policies.size(); ++i) {
      options.trace = &nodes[i];
      DeviceDecode traced(options, layer, steps, device_);
      (void)traced.run(policies[i].spec, 1, std::min(kTracedSteps, options_.steps));
    }
    options.trace = nullptr;
    options.audit_every = 1;
    DeviceDecode audited(options, layer, steps, device_);
    for (std::size_t i = 0; i < policies.size(); ++i) {
      const StepTimes seen = audited.run(policies[i].spec, 1, std::min(options_.audited_steps, options_.steps));
      if (baseline) stream_us_ = percentile(times[i].layer_us, 0.5);
      add_row(layer.options().tokens, baseline ? "stream everything" : policies[i].name, placement, times[i],
              seen.stats, nodes[i]);
    }
  }

  /// With everything attended, every placement must give dense attention.
  void check_dense(DeviceDecode& decode, PlacementMode placement) const {
    const StepTimes whole = decode.run(parse_policy(kEverything), 1, 0);
    require_close(whole.first_out, want_, std::string("dense attention, placement ") + to_string(placement));
  }

  void add_row(std::uint32_t length, const std::string& name, PlacementMode placement, const StepTimes& times,
               const Stats& seen, const NodeTimes& nodes) {
    const double us = percentile(times.layer_us, 0.5);
    const auto share = [&](std::uint64_t bytes) {
      return static_cast<double>(bytes) / static_cast<double>(seen.dense_bytes);
    };
    const double steps = static_cast<double>(times.stats.steps) * shape_.layers;
    std::vector<Json> row = {length,
                             name,
                             to_string(placement),
                             us,
                             percentile(times.layer_us, 0.95),
                             dense_us_ / us,
                             stream_us_ ? Json(*stream_us_ / us) : Json(),
                             seen.coverage.mean(),
                             seen.coverage.percentile(0.05),
                             share(seen.near_bytes),
                             share(seen.far_bytes),
                             static_cast<double>(times.stats.h2d_bytes) / steps,
                             static_cast<double>(times.stats.device_wait_ns) * 1e-3 / steps};
    for (const char* node : kNodes) row.push_back(nodes.median(node));
    table_.rows.push_back(std::move(row));
  }

  const BenchGpuOptions& options_;
  AttentionShape shape_;
  cpu::Topology topology_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const cpu::Workers> builders_;
  std::vector<float> want_;  ///< dense attention of the first step
  double dense_us_ = 0.0;
  std::optional<double> stream_us_;
  Table table_;
};

int run(const BenchGpuOptions& options) {
  (void)parse_pattern(options.pattern);
  const std::vector<std::string> sections = split_list(options.sections);
  for (const std::string& section : sections) {
    if (section != "attention" && section != "kernels") {
      throw Error(Errc::invalid_argument, "--sections: unknown section '" + section + "'; have attention, kernels");
    }
  }
  const AttentionShape shape = named_shape(options.shape_name);
  const OutputTarget target(options.output.path);
  Report report{.command = "bench gpu",
                .config = {{"shape", options.shape_name},
                           {"lengths", parse_counts(options.lengths, "--length")},
                           {"policies", split_policies(options.policies)},
                           {"placements", split_list(options.placements)},
                           {"pattern", options.pattern},
                           {"sinks", options.sinks},
                           {"layers", options.layers},
                           {"page_tokens", options.page_tokens},
                           {"dense_page_tokens", options.dense_page_tokens},
                           {"threads", options.threads},
                           {"steps", options.steps},
                           {"seed", options.seed},
                           {"device", options.device.device},
                           {"transfer", options.device.transfer}}};
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  for (const std::string& section : sections) {
    if (interrupted()) break;
    if (section == "attention") {
      GpuBench bench(options, shape);
      report.config["device"] = bench.device().name;
      try {
        for (const std::uint32_t length : parse_counts(options.lengths, "--length")) bench.run(length, bar);
      } catch (const Interrupted&) {  // The rows that are finished are a result.
      }
      report.tables.push_back(bench.take());
    } else {
      bar.update(0, 1, "kernels");
      report.tables.push_back(bench_gpu_kernels(options.device, shape, options.page_tokens));
    }
  }
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_gpu(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchGpuOptions>();
  options->device.device = "cuda";
  auto* command = bench.add_subcommand("gpu", "Decode attention with the KV cache in host memory against dense in HBM");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  command->add_option("--policies", options->policies, "Policies to measure; see `sluice eval --help`")
      ->capture_default_str();
  command->add_option("--placements", options->placements, "Comma list of hybrid, stream, auto, near")
      ->capture_default_str();
  command->add_option("--pattern", options->pattern, "Attention: structured (heavy tokens, slashes) or uniform (noise)")
      ->capture_default_str();
  add_sinks(*command, options->sinks);
  add_count(*command, "--layers", options->layers, "Layers per step; background work of one overlaps the next",
            {.least = 1, .most = 256});
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page", {.least = 8, .most = 256});
  add_count(*command, "--dense-page-tokens", options->dense_page_tokens, "Tokens per page of the dense yardstick alone",
            {.least = 8, .most = 256});
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_count(*command, "--steps", options->steps, "Timed decode steps; times are medians over them",
            {.least = 1, .most = 4096});
  add_seed(*command, options->seed, "Seed of the synthetic layer");
  command->add_option("--sections", options->sections, "Comma list of attention, kernels")->capture_default_str();
  command->add_flag("--dense-only", options->dense_only, "Only dense attention in device memory");
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Every layer of the model is the same synthetic layer, in host memory of its own. Dense attention through every\n"
      "placement is checked against the device's own before anything is timed. Coverage and the nodes' times come "
      "from\n"
      "a second run, in which every step is audited and traced.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
