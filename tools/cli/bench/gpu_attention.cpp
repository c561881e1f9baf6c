// Forwards of an Engine against dense attention in device memory.
#include "tools/cli/bench/gpu_attention.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/cost_table.hpp"
#include "tools/cli/bench/device.hpp"
#include "tools/cli/bench/gpu_table.hpp"
#include "tools/cli/bench/graph.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/synthetic/synthetic_forwards.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kDensePageTokens = 256;
constexpr std::uint32_t kPageTokens = kGpuPageTokens;
/// Relative error (L2 over all heads) that a correct result stays below: weights are rounded to bf16 on the device.
constexpr double kTolerance = 1e-2;

/// How `--placements` calls it that all tokens lie in device memory: nothing is ever far.
constexpr const char* kNear = "near";

/// What is timed is a layer that the policy works in.
PolicySpec timed_policy(const std::string& text) {
  PolicySpec spec = parse_policy(text);
  spec.dense_layers = spec.dense_every = 0;
  return spec;
}

class GpuBench {
 public:
  GpuBench(const BenchGpuOptions& options, const AttentionShape& shape, std::vector<GpuCase> cases)
      : options_(options),
        shape_(shape),
        cases_(std::move(cases)),
        device_(make_device(options.device)),
        fetch_share_(options.fetch_share),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})) {
    advise(fetch_share_, device_.get(), options.threads);
    // Without a GPU the same forwards run on the embedded device: for trying the command out, not for its times.
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
  }

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, cases_.size(), std::to_string(length) + " tokens: building");
    std::map<std::uint32_t, std::vector<GpuCase>> by_page;
    for (const GpuCase& each : cases_)
      by_page[each.spec.page_tokens == 0 ? kPageTokens : each.spec.page_tokens].push_back(each);
    std::size_t done = 0;
    for (const auto& [page_tokens, cases] : by_page) {
      SyntheticOptions synthetic{
          .shape = shape_,
          .layout = {.page_tokens = page_tokens, .head_dim = shape_.head_dim, .dtype = DType::bf16},
          .tokens = length,
          .steps = options_.warm_up + options_.steps,
          .prompt_queries = std::min(32u, length)};
      synthetic.pattern = parse_pattern(options_.pattern);
      synthetic.sinks = options_.sinks;
      synthetic.seed = options_.seed;
      synthetic.rounded = options_.kv_dtype == DType::fp8_e4m3;  // What the engine is to give is of what it stores.
      const SyntheticLayer layer(synthetic, topology_, builders_);
      const DeviceSteps steps(layer, *device_);
      time_dense(length, cases, layer, steps, done == 0);
      if (options_.dense_only) return;
      for (const GpuCase& each : cases) {
        bar.update(done++, cases_.size(), std::to_string(length) + " tokens: " + each.policy);
        run(length, each, layer, steps);
      }
    }
  }
  [[nodiscard]] Table take() { return table_.take(); }
  [[nodiscard]] Table costs() const { return costs_.take(); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }
  [[nodiscard]] float fetch_share() const noexcept { return fetch_share_.share; }
  /// What `automatic` comes to.
  [[nodiscard]] Handover handover() const noexcept {
    return options_.handover == Handover::automatic ? device_->info().handover : options_.handover;
  }
  /// What was traced, to its file; and its tables.
  void deliver_traces(const OutputTarget& target, std::vector<Table>& tables) const {
    const PageLayout layout{.page_tokens = kPageTokens, .head_dim = shape_.head_dim, .dtype = options_.kv_dtype};
    log_.deliver(measured_rates(device_.get(), layout.page_bytes(), options_.threads), target, tables);
  }

 private:
  /// Of all numbers of rows that there are cases of, and of one.
  void time_dense(std::uint32_t length, const std::vector<GpuCase>& cases, const SyntheticLayer& layer,
                  const DeviceSteps& steps, bool shown) {
    dense_us_.clear();
    std::vector<std::uint32_t> counts{1};
    for (const GpuCase& each : cases) counts.push_back(each.rows);
    for (const std::uint32_t rows : counts) {
      if (dense_us_.contains(rows)) continue;
      DenseOnDevice dense(layer, steps, *device_, kDensePageTokens, row_lengths(rows, length, options_.ragged));
      std::vector<float> out = dense.attend(0);
      if (rows == 1) want_ = std::move(out);
      if (rows != 1 && !(relative_error(out, want_) <= kTolerance))
        throw Error(Errc::device, "bench gpu: dense attention of " + std::to_string(rows) +
                                      " sequences is not what the first of them gives alone; nothing of it was timed");
      dense_us_[rows] = percentile(dense.time(9), 0.5);
      const double tokens = rows * mean_length(rows, length);
      costs_.add_dense(2.0 * static_cast<double>(layer.options().layout.row_bytes()) * tokens * shape_.kv_heads,
                       dense_us_[rows]);
      if (shown) table_.add_dense(length, rows, dense_us_[rows]);
    }
  }
  [[nodiscard]] double mean_length(std::uint32_t rows, std::uint32_t length) const {
    const std::vector<std::uint32_t> lengths = row_lengths(rows, length, options_.ragged);
    return std::accumulate(lengths.begin(), lengths.end(), 0.0) / rows;
  }

  void run(std::uint32_t length, const GpuCase& given, const SyntheticLayer& layer, const DeviceSteps& steps) {
    const GpuCase each = limited(length, given, layer.options().layout.page_tokens);
    check(length, each, layer, steps);
    const AuditReport audited = audit(length, each, layer, steps);
    for (const bool graph : {false, true}) {
      if (graph && !can_capture(*device_, options_.handover)) continue;
      std::vector<GpuRow> repeats;
      for (std::uint32_t i = 0; i < options_.repeats; ++i) {
        repeats.push_back(timed(length, each, layer, steps, graph));
        repeats.back().audited = &audited;
      }
      const auto median = [](const GpuRow& row) { return percentile(row.layer_us, 0.5); };
      std::ranges::sort(repeats, {}, median);
      GpuRow& row = repeats[repeats.size() / 2];
      row.worst_us = median(repeats.back());
      table_.add(row);
      costs_.add(row);
    }
    if (!options_.trace.empty()) trace(length, each, layer, steps);
  }

  /// An engine of its own, from its first token on.
  GpuRow timed(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer, const DeviceSteps& steps,
               bool graph) const {
    SyntheticForwards forwards(forwards_of(each, each.spec, length), layer, steps, device_);
    (void)forwards.time(options_.warm_up, graph);
    const EngineStats before = forwards.engine().stats();
    GpuRow row{.length = length,
               .policy = each.policy,
               .far_budget = far_budget(each.spec, shape_, length),
               .placement = each.all_near ? kNear : to_string(each.placement),
               .rows = each.rows,
               .graph = graph,
               .layers = options_.layers,
               .steps = options_.steps,
               .kv_heads = shape_.kv_heads,
               .layout = {.page_tokens = layer.options().layout.page_tokens,
                          .head_dim = shape_.head_dim,
                          .dtype = options_.kv_dtype},
               .mean_tokens = mean_length(each.rows, length) + options_.warm_up + 0.5 * options_.steps,
               .dense_us = dense_us_.at(each.rows),
               .output_error = error_};
    row.layer_us = forwards.time(options_.steps, graph, &row.calling_us);
    row.stats = since(before, forwards.engine().stats());
    row.verbs = forwards.verbs();
    row.graph_nodes = forwards.graph_nodes();
    row.memory = forwards.engine().memory();
    if (each.all_near && row.stats.far_tokens + row.stats.fetched_tokens != 0)
      throw Error(Errc::device, "bench gpu: " + std::to_string(row.stats.far_tokens + row.stats.fetched_tokens) +
                                    " tokens were far though device memory has room for all; nothing of it is shown");
    return row;
  }

  /// With the budget of far tokens that --far says, at this length.
  [[nodiscard]] GpuCase limited(std::uint32_t length, GpuCase each, std::uint32_t page_tokens) {
    const FarPlace place{.shape = shape_,
                         .kv_dtype = options_.kv_dtype,
                         .placement = each.placement,
                         .page_tokens = page_tokens,
                         .rows = each.rows,
                         .tokens = length,
                         .near_hits = usual_near_hits(near_share(each))};
    each.policy = with_far(each.policy, options_.far, place, [&] {
      if (!rates_)
        rates_ = measured_rates(device_.get(),
                                PageLayout{.head_dim = shape_.head_dim, .dtype = options_.kv_dtype}.page_bytes(),
                                options_.threads);
      return *rates_;
    });
    each.spec = timed_policy(each.policy);
    return each;
  }

  /// Of an engine of its own: what is timed is not traced.
  void trace(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer, const DeviceSteps& steps) {
    constexpr std::uint32_t kForwards = 4;
    const std::string kind = std::to_string(length) + " " + each.policy + " " +
                             (each.all_near ? kNear : to_string(each.placement)) + " x" + std::to_string(each.rows);
    bool warm = false;
    SyntheticForwardsOptions options = forwards_of(each, each.spec, length);
    options.on_trace = [&](const ForwardTrace& trace) {
      if (warm) log_.add(kind, trace);
    };
    SyntheticForwards forwards(options, layer, steps, device_);
    const bool graph = can_capture(*device_, options_.handover);
    (void)forwards.time(options_.warm_up, graph);
    warm = true;
    (void)forwards.time(std::min(kForwards, options_.steps), graph);
  }

  /// Everything chosen must be dense attention; what the policy's choice is off by is a result.
  void check(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer, const DeviceSteps& steps) {
    GpuCase alone = each;
    alone.rows = 1;
    alone.all_near = false;
    // One engine after the other, so that only one holds memory.
    auto whole = std::make_unique<SyntheticForwards>(
        forwards_of(alone, parse_policy("exact | int4 | top_k=all | near=0,sinks=4,recent=128"), length), layer, steps,
        device_);
    const double off = relative_error(first_out(*whole), want_);
    if (!(off <= kTolerance))
      throw Error(Errc::device, "bench gpu: dense attention of " + std::to_string(length) +
                                    " tokens is wrong (relative error " + std::to_string(off) +
                                    "); nothing of it was timed");
    whole.reset();
    SyntheticForwards chosen(forwards_of(each, each.spec, length), layer, steps, device_);
    error_ = relative_error(first_out(chosen), want_);
  }

  AuditReport audit(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                    const DeviceSteps& steps) const {
    SyntheticForwardsOptions options = forwards_of(each, each.spec, length);
    options.audit = true;
    SyntheticForwards forwards(options, layer, steps, device_);
    forwards.audit(false);
    (void)forwards.time(options_.warm_up);  // What is audited is what is timed.
    forwards.audit(true);
    (void)forwards.time(std::min(options_.audited_steps, options_.steps));
    return forwards.engine().audit(forwards.sequence());
  }

  static std::vector<float> first_out(SyntheticForwards& forwards) {
    (void)forwards.time(1);
    return forwards.out();
  }

  [[nodiscard]] double near_share(const GpuCase& each) const noexcept {
    return each.all_near ? 1.0 : options_.near_share;
  }
  [[nodiscard]] SyntheticForwardsOptions forwards_of(const GpuCase& each, const PolicySpec& policy,
                                                     std::uint32_t length) const {
    return {.policy = policy,
            .rows = each.rows,
            .lengths = row_lengths(each.rows, length, options_.ragged),
            .layers = options_.layers,
            .kv_dtype = options_.kv_dtype,
            .near_share = near_share(each),
            .placement = each.placement,
            .fetch_share = share_for(each.placement, fetch_share_),
            .handover = options_.handover,
            .threads = options_.threads,
            .promotions = options_.promotions,
            .dense_tokens = options_.dense_tokens.value_or(0)};
  }

  const BenchGpuOptions& options_;
  AttentionShape shape_;
  std::vector<GpuCase> cases_;
  cpu::Topology topology_;
  std::shared_ptr<Device> device_;
  FetchShare fetch_share_;
  std::shared_ptr<const cpu::Workers> builders_;
  std::vector<float> want_;                   ///< dense attention of the first step
  std::map<std::uint32_t, double> dense_us_;  ///< by rows
  double error_ = 0.0;
  std::optional<scheduler::LaneRates> rates_;  ///< measured once they are asked for
  GpuTable table_;
  CostTable costs_;
  TraceLog log_;
};

}  // namespace

std::vector<GpuCase> gpu_cases(const BenchGpuOptions& options) {
  std::vector<GpuCase> cases;
  for (const std::string& policy : split_policies(options.policies)) {
    const PolicySpec spec = timed_policy(policy);
    if (options.far != "auto") (void)with_far(policy, options.far, {}, {});  // Refused before anything is built.
    for (const std::string& placement : split_list(options.placements)) {
      const bool all_near = placement == kNear;
      if (all_near && scheduler::chooser(spec) == scheduler::Chooser::cpu)
        throw Error(Errc::unsupported, "--placements near: policy '" + policy +
                                           "' chooses on the CPU, which reads keys in host memory; place it hybrid or "
                                           "stream");
      for (const std::uint32_t rows : parse_counts(options.rows, "--rows"))
        cases.push_back({.policy = policy,
                         .spec = spec,
                         .placement = all_near ? PlacementMode::hybrid : parse_placement(placement),
                         .all_near = all_near,
                         .rows = rows});
    }
  }
  return cases;
}

void bench_gpu_attention(const BenchGpuOptions& options, const AttentionShape& shape,
                         std::span<const std::uint32_t> lengths, std::vector<GpuCase> cases,
                         const OutputTarget& trace_target, ProgressBar& bar, Report& report) {
  GpuBench bench(options, shape, std::move(cases));
  report.config["device"] = bench.device().name;
  report.config["fetch_share"] = bench.fetch_share();
  report.config["handover"] = to_string(bench.handover());
  try {
    for (const std::uint32_t length : lengths) bench.run(length, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  report.tables.push_back(bench.take());
  if (options.costs) report.tables.push_back(bench.costs());
  if (!options.trace.empty()) bench.deliver_traces(trace_target, report.tables);
}

}  // namespace sluice::tools
