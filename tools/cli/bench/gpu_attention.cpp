// Forwards of an Engine against dense attention in device memory.
#include "tools/cli/bench/gpu_attention.hpp"
#include "tools/cli/bench/cost_table.hpp"

#include <algorithm>
#include <map>

#include "sluice/error.hpp"
#include "tools/cli/bench/gpu_rig.hpp"
#include "tools/cli/bench/gpu_table.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/graph.hpp"

namespace sluice::tools {
namespace {

class GpuBench {
 public:
  GpuBench(GpuRig& rig, std::vector<GpuCase> cases) : rig_(rig), options_(rig.options()), cases_(std::move(cases)) {}

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, cases_.size(), std::to_string(length) + " tokens: building");
    std::size_t done = 0;
    const auto use = [&](const SyntheticLayer& layer, const DeviceSteps& steps, const std::vector<GpuCase>& cases) {
      dense_us_ = rig_.time_dense(length, cases, layer, steps);
      const double token_bytes = 2.0 * static_cast<double>(layer.options().layout.row_bytes()) * rig_.shape().kv_heads;
      for (const auto& [rows, us] : dense_us_)
        costs_.add_dense(token_bytes * rows * rig_.mean_length(rows, length), us);
      if (done == 0) {
        for (const auto& [rows, us] : dense_us_) table_.add_dense(length, rows, us);
      }
      if (options_.dense_only) return;
      for (const GpuCase& each : cases) {
        bar.update(done++, cases_.size(), std::to_string(length) + " tokens: " + each.policy);
        run(length, each, layer, steps);
      }
    };
    rig_.for_each_layer(length, options_.warm_up + options_.steps, cases_, use);
  }
  [[nodiscard]] Table take() { return table_.take(); }
  [[nodiscard]] Table costs() const { return costs_.take(); }
  /// What was traced, for its file; and its tables.
  [[nodiscard]] std::string tell_traces(std::vector<Table>& tables) const { return log_.tell(rig_.rates(), tables); }

 private:
  void run(std::uint32_t length, const GpuCase& given, const SyntheticLayer& layer, const DeviceSteps& steps) {
    const GpuCase each = rig_.limited(length, given, layer.options().layout.page_tokens);
    // What the policy's choice is off by is a result. One engine after the other, so that only one holds memory.
    rig_.require_dense(length, each, layer, steps);
    error_ = rig_.first_error(length, each, layer, steps);
    const AuditReport audited = rig_.audit(length, each, layer, steps, options_.layers);
    for (const bool graph : {false, true}) {
      if (graph && !can_capture(*rig_.device(), options_.handover)) continue;
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
    SyntheticForwards forwards(rig_.forwards_of(length, each), layer, steps, rig_.device());
    (void)forwards.time(options_.warm_up, graph);
    const EngineStats before = forwards.engine().stats();
    GpuRow row{.length = length,
               .policy = each.policy,
               .far_budget = far_budget(each.spec, rig_.shape(), length),
               .placement = each.all_near ? kNear : to_string(each.placement),
               .rows = each.rows,
               .graph = graph,
               .layers = options_.layers,
               .steps = options_.steps,
               .kv_heads = rig_.shape().kv_heads,
               .layout = {.page_tokens = layer.options().layout.page_tokens,
                          .head_dim = rig_.shape().head_dim,
                          .dtype = options_.kv_dtype},
               .mean_tokens = rig_.mean_length(each.rows, length) + options_.warm_up + 0.5 * options_.steps,
               .dense_us = dense_us_.at(each.rows),
               .output_error = error_};
    row.layer_us = forwards.time(options_.steps, graph, &row.calling_us);
    row.stats = since(before, forwards.engine().stats());
    row.verbs = forwards.verbs();
    row.graph_nodes = forwards.graph_nodes();
    row.memory = forwards.engine().memory();
    row.code_bits = forwards.engine().sizes().code_bits;
    if (each.all_near && row.stats.far_tokens + row.stats.fetched_tokens != 0)
      throw Error(Errc::device, "bench gpu: " + std::to_string(row.stats.far_tokens + row.stats.fetched_tokens) +
                                    " tokens were far though device memory has room for all; nothing of it is shown");
    return row;
  }

  /// Of an engine of its own: what is timed is not traced.
  void trace(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer, const DeviceSteps& steps) {
    constexpr std::uint32_t kForwards = 4;
    const std::string kind = std::to_string(length) + " " + each.policy + " " +
                             (each.all_near ? kNear : to_string(each.placement)) + " x" + std::to_string(each.rows);
    bool warm = false;
    SyntheticForwardsOptions options = rig_.forwards_of(length, each);
    options.on_trace = [&](const ForwardTrace& trace) {
      if (warm) log_.add(kind, trace);
    };
    SyntheticForwards forwards(options, layer, steps, rig_.device());
    const bool graph = can_capture(*rig_.device(), options_.handover);
    (void)forwards.time(options_.warm_up, graph);
    warm = true;
    (void)forwards.time(std::min(kForwards, options_.steps), graph);
  }

  GpuRig& rig_;
  const BenchGpuOptions& options_;
  std::vector<GpuCase> cases_;
  std::map<std::uint32_t, double> dense_us_;  ///< by rows
  double error_ = 0.0;
  GpuTable table_;
  CostTable costs_;
  TraceLog log_;
};

}  // namespace

std::string bench_gpu_attention(GpuRig& rig, std::span<const std::uint32_t> lengths, std::vector<GpuCase> cases,
                                ProgressBar& bar, Report& report) {
  GpuBench bench(rig, std::move(cases));
  try {
    for (const std::uint32_t length : lengths) bench.run(length, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  report.tables.push_back(bench.take());
  if (rig.options().costs) report.tables.push_back(bench.costs());
  return rig.options().trace.empty() ? std::string() : bench.tell_traces(report.tables);
}

}  // namespace sluice::tools
