// `sluice plan`: what a machine would make of a model's attention, before anything is built or bought.
#include <memory>

#include "sluice/error.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/fetch_share.hpp"
#include "tools/cli/plan/planner.hpp"
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
  FetchShare fetch_share;
  DType kv_dtype = DType::bf16;
  std::string machine;
  Machine changes;  ///< what is not 0 takes the place of the machine's
  std::string near = "5%";
  std::string near_hits = "50%";
  std::string attended = "5%";
  std::uint64_t weights = 0;
  std::uint32_t threads = 0;
  DeviceFlags device;
  OutputOptions output;
};

Machine machine_of(const PlanOptions& options) {
  Machine machine = options.machine.empty() ? this_machine(make_device(options.device).get(), options.threads)
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
  return machine;
}

Table make_table() {
  return {.key = "plan",
          .title = "Decoding, attention alone, as the engine plans it (dense: its reads, everything in device memory)",
          .columns = {{"policy", "policy"},
                      {"placement", "placement"},
                      {"length_tokens", "length"},
                      {"rows", "rows"},
                      {"token_ms", "ms/token", 2},
                      {"layer_us", "us/layer", 1},
                      {"far_budget_tokens", "far budget"},
                      {"bottleneck", "busiest"},
                      {"device_us", "device", 1},
                      {"link_us", "link", 1},
                      {"cpu_us", "cpu", 1},
                      {"speedup_over_dense", "x dense", 2},
                      {"host_bytes", "host B"},
                      {"device_bytes", "device B"},
                      {"fits", "fits"},
                      {"most_rows", "most rows"},
                      {"most_tokens", "most tokens"}}};
}

Table make_memory_table() {
  using Show = Column::Show;
  return {.key = "memory",
          .title = "Memory of such an engine beside keys and values, as a share of them (policy: the most it may keep)",
          .columns = {{"policy", "policy"},
                      {"placement", "placement"},
                      {"length_tokens", "length"},
                      {"rows", "rows"},
                      {"kv_bytes", "K and V, B"},
                      {"near_share", "near rows", 1, Show::percent},
                      {"codes_share", "4-bit copies", 1, Show::percent},
                      {"digests_share", "digests", 1, Show::percent},
                      {"buffers_share", "buffers", 1, Show::percent},
                      {"pinned_share", "host: pinned", 1, Show::percent},
                      {"policies_share", "host: policy", 1, Show::percent}}};
}

std::vector<Json> memory_row(const std::string& name, const Workload& work, const EngineMemoryUse& memory) {
  const auto share = [&](std::uint64_t bytes) {
    return memory.far_pages == 0 ? Json() : Json(static_cast<double>(bytes) / static_cast<double>(memory.far_pages));
  };
  return {name,
          to_string(work.placement),
          work.tokens,
          work.rows,
          memory.far_pages,
          share(memory.near_pages),
          share(memory.codes),
          share(memory.digests),
          share(memory.buffers),
          share(memory.pinned),
          share(memory.policies)};
}

std::vector<Json> row_of(const std::string& name, const Workload& work, const Machine& machine, std::uint64_t reserved,
                         const WorkloadPlan& found) {
  const auto busy = [&](Lane lane) { return found.busy_us[static_cast<std::size_t>(lane)] / work.shape.layers; };
  return {name,
          to_string(work.placement),
          work.tokens,
          work.rows,
          1e-3 * found.forward_us,
          found.forward_us / work.shape.layers,
          far_budget(work.policy, work.shape, work.tokens),
          to_string(found.bottleneck),
          busy(Lane::device),
          busy(Lane::link),
          busy(Lane::cpu),
          found.dense_us / found.forward_us,
          found.memory.host(),
          found.memory.device(),
          found.fits,
          most_rows(work, machine, reserved),
          most_tokens(work, machine, reserved)};
}

FarPlace far_place(const Workload& work) {
  return {.shape = work.shape,
          .kv_dtype = work.kv_dtype,
          .placement = work.placement,
          .page_tokens = work.page_tokens,
          .rows = work.rows,
          .tokens = work.tokens,
          .near_hits = work.near_hits};
}

int run(const PlanOptions& options) {
  AttentionShape shape = model_shape(options.shape);
  if (options.layers != 0) shape.layers = options.layers;
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  const std::vector<std::uint32_t> rows = parse_counts(options.rows, "--rows");
  const OutputTarget target(options.output.path);
  const Machine machine = machine_of(options);
  FetchShare fetch_share = options.fetch_share;
  if (fetch_share.advised) fetch_share.share = scheduler::advised_fetch_share(machine.rates);
  Table table = make_table(), memory = make_memory_table();
  for (const std::string& policy : split_policies(options.policies)) {
    Workload work{.shape = shape,
                  .kv_dtype = options.kv_dtype,
                  .policy = parse_policy(policy),
                  .near_share = parse_share(options.near, "--near"),
                  .near_hits = parse_share(options.near_hits, "--near-hits"),
                  .attended = parse_share(options.attended, "--attended")};
    work.page_tokens = page_tokens_for(work.policy, EngineFlags{});
    for (const std::string& placement : split_list(options.placements)) {
      work.placement = parse_placement(placement);
      work.fetch_share = share_for(work.placement, fetch_share);
      for (const std::uint32_t tokens : lengths) {
        for (const std::uint32_t count : rows) {
          work.tokens = tokens;
          work.rows = count;
          const std::string name = with_far(policy, options.far, far_place(work), [&] { return machine.rates; });
          Workload limited = work;
          limited.policy = parse_policy(name);
          const WorkloadPlan found = plan(limited, machine, options.weights);
          table.rows.push_back(row_of(name, limited, machine, options.weights, found));
          memory.rows.push_back(memory_row(name, limited, found.memory));
        }
      }
    }
  }
  Report report{.command = "plan",
                .config = {{"shape", options.shape},
                           {"layers", shape.layers},
                           {"machine", to_json(machine)},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"fetch_share", fetch_share.share},
                           {"near", options.near},
                           {"near_hits", options.near_hits},
                           {"attended", options.attended},
                           {"far", options.far},
                           {"weights_bytes", options.weights}}};
  report.tables.push_back(std::move(table));
  report.tables.push_back(std::move(memory));
  return deliver(std::move(report), options.output.format, target);
}

void add_machine_flags(CLI::App& command, PlanOptions& options) {
  constexpr NumberRange kRate{.least = 0.001, .most = 1e6};
  scheduler::LaneRates& rates = options.changes.rates;
  command.add_option("--machine", options.machine, "What `sluice doctor --machine FILE` wrote [default: this machine]")
      ->type_name("FILE");
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
  command->add_option("--placements", options->placements, "Comma list of hybrid and stream")->capture_default_str();
  add_fetch_share(*command, options->fetch_share);
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->capture_default_str();
  command
      ->add_option("--near-hits", options->near_hits,
                   "Share of the attended tokens that lie near when they are wanted; `bench gpu` and `eval` measure it")
      ->capture_default_str();
  command
      ->add_option("--attended", options->attended,
                   "Share of its tokens that a KV head attends where the policy goes by mass, such as twilight")
      ->capture_default_str();
  add_far(*command, options->far);
  add_size(*command, "--weights", options->weights, "Device memory that is not for attention, K/M/G allowed");
  add_machine_flags(*command, *options);
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Times are those of the engine's own plan on the machine's rates: bytes over bandwidth, and what kernels and a\n"
      "question to the CPU cost beside (`stages` of the machine's file: measured on one H100 for policies that choose by\n"
      "4-bit copies; other stages, and machines without a GPU, count as their bytes and a launch: a bound from below).\n"
      "Arithmetic, and what a model does between layers, are not in them. A\n"
      "budget in tokens counts as if no two query heads that share a KV head wanted the same. Of device memory, what "
      "a\n"
      "GPU's kernels want for themselves is not counted.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
