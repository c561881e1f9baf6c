// `sluice plan`: what a machine would make of a model's attention, before anything is built or bought.
#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>

#include "scheduler/plan/fetch_advice.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/fetch_share.hpp"
#include "tools/cli/near_share.hpp"
#include "tools/cli/plan/measured.hpp"
#include "tools/cli/plan/near_hits.hpp"
#include "tools/cli/plan/plan_plot.hpp"
#include "tools/cli/plan/plan_tables.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

struct PlanOptions {
  std::string shape = "llama-3.1-8b";
  std::uint32_t layers = 0;
  std::string policies = "sluice";
  std::string lengths = "32K,128K";
  std::string rows = "1";
  std::string placements = "hybrid";
  std::string far;
  float fetch_share = kFetchAuto;
  DType kv_dtype = DType::bf16;
  std::string machine;
  std::vector<std::string> measured;
  std::string plot;
  std::uint32_t gpus = 1;
  Machine changes;  ///< what is not 0 takes the place of the machine's
  std::string near;  ///< none: usual_near_share of the length
  std::string near_hits;  ///< none: usual_near_hits of policy and length
  std::string attended = "5%";
  std::uint64_t weights = 0;
  std::uint32_t threads = 0;
  DeviceFlags device;
  OutputOptions output;
};

Machine machine_of(const PlanOptions& options) {
  Machine machine = options.machine.empty() ? this_machine(make_device(options.device), options.threads, Effort::brief)
                                            : load_machine(options.machine);
  const Machine& changes = options.changes;
  const auto take = [](auto& value, const auto& change) {
    if (change > 0) value = change;
  };
  take(machine.rates.device_gbps, changes.rates.device_gbps);
  take(machine.rates.link_gbps, changes.rates.link_gbps);
  take(machine.rates.cpu_gbps, changes.rates.cpu_gbps);
  take(machine.device_bytes, changes.device_bytes);
  take(machine.host_bytes, changes.host_bytes);
  // Each has its own link and memory, and a part of the host.
  machine.rates.cpu_gbps /= options.gpus;
  machine.host_bytes /= options.gpus;
  return machine;
}

/// What one of the GPUs has of the heads.
AttentionShape shape_of(const PlanOptions& options) {
  AttentionShape shape = model_shape(options.shape);
  if (options.layers != 0) shape.layers = options.layers;
  if (shape.kv_heads % options.gpus != 0)
    throw Error(Errc::invalid_argument, "--gpus: " + std::to_string(shape.kv_heads) + " KV heads cannot be shared by " +
                                            std::to_string(options.gpus) + " GPUs; take a number that divides them");
  shape.q_heads /= options.gpus;
  shape.kv_heads /= options.gpus;
  return shape;
}

FarPlace far_place(const Workload& work, double near_hits) {
  return {.shape = work.shape,
          .kv_dtype = work.kv_dtype,
          .placement = work.placement,
          .page_tokens = work.page_tokens,
          .rows = work.rows,
          .tokens = work.tokens,
          .near_hits = near_hits};
}

/// Every policy, placement, length and number of rows: tables, and a curve for each number of rows.
class Plans {
 public:
  Plans(const PlanOptions& options, const Machine& machine)
      : options_(options), machine_(machine), shape_(shape_of(options)) {}

  void add_all() {
    const std::vector<std::uint32_t> lengths = parse_counts(options_.lengths, "--length");
    const std::vector<std::uint32_t> rows = parse_counts(options_.rows, "--rows");
    for (const std::string& policy : split_policies(options_.policies)) {
      Workload work{.shape = shape_,
                    .kv_dtype = options_.kv_dtype,
                    .policy = parse_policy(policy),
                    .attended = parse_share(options_.attended, "--attended"),
                    .weights_bytes = weights_read(options_.shape, shape_.layers) / options_.gpus};
      work.page_tokens = page_tokens_for(work.policy, EngineFlags{});
      for (const std::string& placement : split_list(options_.placements, "--placements")) {
        work.near_share = options_.near.empty() ? 0.0 : parse_share(options_.near, "--near");
        work.near_hits = 0.0;
        place(placement, work);
        const bool all_near = work.near_hits == 1.0;
        const bool usual = options_.near.empty() && !all_near;
        const PolicyCosts* const costs = like(work.policy, machine_.policies);
        const bool by_cpu = scheduler::chooser(work.policy) == scheduler::Chooser::cpu;
        work.scored = costs != nullptr ? costs->scored : by_cpu ? 1.0 : 0.0;
        for (const std::uint32_t tokens : lengths) {
          work.tokens = tokens;
          if (usual) work.near_share = usual_near_share(tokens);
          for (const std::uint32_t count : rows) {
            work.rows = count;
            work.fetch_share = share_for(work.placement, fetch_share(count));
            add(policy, work);
          }
        }
      }
    }
  }
  [[nodiscard]] Table take_times() { return std::move(times_); }
  [[nodiscard]] Table take_memory() { return std::move(memory_); }
  [[nodiscard]] const std::vector<PlannedSeries>& series() const noexcept { return series_; }

 private:
  /// What an engine does with so many rows.
  [[nodiscard]] float fetch_share(std::uint32_t rows) const {
    if (options_.fetch_share != kFetchAuto) return options_.fetch_share;
    if (std::uint64_t{rows} * shape_.kv_heads < scheduler::kFetchLists || machine_.device_bytes == 0) return 0.f;
    return scheduler::advised_fetch_share(machine_.rates.link_gbps, machine_.rates.cpu_gbps);
  }
  [[nodiscard]] double asked_hits() const { return parse_share(options_.near_hits, "--near-hits"); }

  /// `work` says all but its near_hits, unless these are all. What the CPU chooses it attends in place, whatever is
  /// asked for.
  [[nodiscard]] NearHits hits_of(const Workload& work) const {
    if (work.near_hits == 1.0) return {.share = 1.0, .from = "all near"};
    const bool by_cpu = scheduler::chooser(work.policy) == scheduler::Chooser::cpu;
    const bool in_place = by_cpu && work.placement == PlacementMode::hybrid;
    if (options_.near_hits.empty() || in_place) return usual_near_hits(work);
    return {.share = asked_hits(), .from = "given"};
  }

  /// What a budget of far tokens is advised for: as other commands have it, which know no more of the policy.
  [[nodiscard]] double far_hits(const Workload& work) const {
    if (work.near_hits == 1.0) return 1.0;
    return options_.near_hits.empty() ? usual_near_hits(work.near_share) : asked_hits();
  }

  void add(const std::string& policy, Workload work) {
    const std::string name = with_far(policy, options_.far, far_place(work, far_hits(work)),
                                      [&] { return rates_for(work.policy, machine_.policies, machine_.rates); });
    work.policy = parse_policy(name);
    const NearHits hits = hits_of(work);
    work.near_hits = hits.share;
    work.linked = usual_linked(work, machine_);
    const WorkloadPlan found = plan(work, machine_, options_.weights);
    times_.rows.push_back(plan_row({name, hits.from}, work, machine_, options_.weights, found));
    memory_.rows.push_back(memory_row(name, work, found.memory));
    const std::string curve =
        policy + ", " + placement_of(work) + (work.rows == 1 ? "" : ", " + std::to_string(work.rows) + " sequences");
    auto at = std::ranges::find(series_, curve, &PlannedSeries::name);
    if (at == series_.end()) at = series_.insert(at, {.name = curve, .points = {}});
    const auto gib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(GiB); };
    at->points.push_back({.tokens = static_cast<double>(work.tokens),
                          .token_ms = 1e-3 * found.forward_us,
                          .device_gib = gib(found.memory.device()),
                          .host_gib = gib(found.memory.host())});
  }

  const PlanOptions& options_;
  const Machine& machine_;
  AttentionShape shape_;
  Table times_ = plan_table(), memory_ = memory_table();
  std::vector<PlannedSeries> series_;
};

/// What was timed, as this machine's plan has it.
Table compared(const std::vector<Measured>& measured, const Machine& machine) {
  Table table = compared_table();
  for (const Measured& each : measured) table.rows.push_back(compared_row(each, plan(each.work, machine, 0)));
  return table;
}

int run(const PlanOptions& options) {
  const AttentionShape shape = shape_of(options);
  std::vector<Measured> measured;
  for (const std::string& file : options.measured) std::ranges::move(load_measured(file), std::back_inserter(measured));
  require_distinct({{"--output", options.output.path}, {"--plot", options.plot, !options.plot.empty()}});
  const OutputTarget target(options.output.path);
  const OutputTarget plot(options.plot);
  const Machine machine = machine_of(options);
  Report report{.command = "plan",
                .config = {{"shape", options.shape},
                           {"layers", shape.layers},
                           {"gpus", options.gpus},
                           {"machine", to_json(machine)},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"fetch_share", fetch_share_json(options.fetch_share)},
                           {"near", options.near},
                           {"near_hits", options.near_hits.empty() ? Json() : Json(options.near_hits)},
                           {"attended", options.attended},
                           {"far", options.far},
                           {"measured", options.measured},
                           {"weights_bytes", options.weights}}};
  if (!measured.empty()) {
    report.tables.push_back(compared(measured, machine));
    return deliver(std::move(report), options.output.format, target);
  }
  Plans plans(options, machine);
  plans.add_all();
  const std::string svg = options.plot.empty() ? std::string() : plan_svg(plans.series());
  report.tables.push_back(plans.take_times());
  report.tables.push_back(plans.take_memory());
  return deliver_beside(std::move(report), options.output.format, target, svg, plot);
}

void add_machine_flags(CLI::App& command, PlanOptions& options) {
  constexpr NumberRange kRate{.least = 0.001, .most = 1e6};
  scheduler::LaneRates& rates = options.changes.rates;
  command.add_option("--machine", options.machine, "What `sluice doctor --machine FILE` wrote [default: this machine]")
      ->type_name("FILE");
  add_count(
      command, "--gpus", options.gpus,
      "GPUs that share the heads, each with its own link and memory, and the host's between them; what is shown is "
      "of one",
      {.least = 1, .most = 64});
  add_number(command, "--device-gbps", rates.device_gbps, "Attention over rows in device memory, GB/s", kRate)
      ->default_str("the machine's");
  add_number(command, "--link-gbps", rates.link_gbps, "The link, GB/s", kRate)->default_str("the machine's");
  add_number(command, "--cpu-gbps", rates.cpu_gbps, "Host memory, read by all threads, GB/s", kRate)
      ->default_str("the machine's");
  add_size(command, "--device-size", options.changes.device_bytes, "Memory of the device, K/M/G allowed")
      ->default_str("the machine's");
  add_size(command, "--host-size", options.changes.host_bytes, "Memory of the host, K/M/G allowed")
      ->default_str("the machine's");
  add_count(command, "--threads", options.threads, "Threads whose read rate is measured here; 0: one per core",
            {.most = 4096});
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  options->changes.rates = {.launch_us = 0.0, .hand_over_us = 0.0};
  auto* command = app.add_subcommand("plan", "Say what a machine would make of a model: time, memory, largest batch");
  command->add_option("--shape", options->shape, "One of " + shape_names())->capture_default_str();
  add_count(*command, "--layers", options->layers, "Layers [default: the model's]", {.least = 1, .most = 1024})
      ->default_str("");
  command->add_option("--policies", options->policies, "Policies; see `sluice eval --help`")->capture_default_str();
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  command->add_option("--rows", options->rows, "Comma list of numbers of sequences")->capture_default_str();
  command
      ->add_option("--placements", options->placements,
                   "Comma list of hybrid, stream, and near: device memory has room for all tokens")
      ->capture_default_str();
  add_fetch_share(*command, options->fetch_share);
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->default_str(kUsualNearText);
  command
      ->add_option("--near-hits", options->near_hits,
                   "Share of the attended tokens that lie near when they are wanted; `bench gpu` and `eval` measure it")
      ->default_str(kUsualHitsText);
  command
      ->add_option("--attended", options->attended,
                   "Share of its tokens that a KV head attends where the policy goes by mass, such as twilight")
      ->capture_default_str();
  add_far(*command, options->far);
  add_size(*command, "--weights", options->weights, "Device memory that is not for attention, K/M/G allowed", 0);
  add_machine_flags(*command, *options);
  add_device_flags(*command, options->device);
  command
      ->add_option("--measured", options->measured,
                   "Reports of `sluice bench gpu -o json`: their configurations are planned, with the shares of tokens "
                   "that they found, and held against the times; what is asked for otherwise is not planned")
      ->type_name("FILE");
  command->add_option("--plot", options->plot, "Draw time and memory against the length as an SVG")->type_name("FILE");
  add_output(*command, options->output);
  command->footer(
      "Times are those of the engine's own plan: for each stage of a layer what the machine's file says (`stages`: a\n"
      "fixed part, and bytes at a share of the lane's rate, measured there by timing forwards), the CPU's part beside\n"
      "the device's. Without --machine this machine is measured first, for some seconds and up to 32K tokens. Of "
      "stages\n"
      "that the file does not have, bytes and a launch count. What a model does between layers is not in it; `model "
      "ms`\n"
      "has the bytes of its weights in bf16 besides, at the rate of device memory, and nothing else of it. A budget\n"
      "in tokens counts as if no two query heads that share a KV head wanted the same, but for what of it has room "
      "near:\n"
      "55% of it, as measured. Of device memory, what a GPU's kernels want for themselves is not counted. What if:\n"
      "--link-gbps 25 (PCIe 4), --gpus 2, --cpu-gbps, --policies.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
