// Policies as they are published, in `stream`: the CPU chooses, the link carries, the device attends.
#include "tools/cli/bench/gpu_pipeline.hpp"

#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/pipeline_times.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/llama/graph.hpp"

namespace sluice::tools {
namespace {

/// Forwards that are traced behind those that are timed.
constexpr std::uint32_t kTraced = 8;

/// One engine's forwards.
struct Measured {
  double layer_us = 0.0;
  EngineStats stats{};  ///< of the timed forwards
  /// Of traced ones, the median of each time; none where the device chooses, which may fetch in the launch that attends
  /// what is near.
  std::optional<PipelineTimes> times{};
  std::vector<float> out{};  ///< of the last one

  [[nodiscard]] std::uint64_t attended() const noexcept {
    return stats.near_tokens + stats.far_tokens + stats.fetched_tokens;
  }
};

PipelineTimes median(const std::vector<PipelineTimes>& all) {
  const auto of = [&](double PipelineTimes::*each) {
    std::vector<double> us;
    for (const PipelineTimes& times : all) us.push_back(times.*each);
    return percentile(us, 0.5);
  };
  return {.choice_us = of(&PipelineTimes::choice_us),
          .waited_us = of(&PipelineTimes::waited_us),
          .exposed_us = of(&PipelineTimes::exposed_us)};
}

Table empty_table(double gather_gbps) {
  using Show = Column::Show;
  char rate[32];
  (void)std::snprintf(rate, sizeof rate, "%.1f GB/s", gather_gbps);
  return {.key = "pipeline",
          .title = std::string("What the CPU chooses crosses the link, at ") + rate +
                   ": a layer, the parts of it that are waited for, and what it may take (us)",
          .columns = {{"length_tokens", "length"},
                      {"method", "method"},
                      {"rows", "rows"},
                      {"prefetch", "prefetch"},
                      {"layer_us", "us/layer", 1},
                      {"speedup_over_dense", "x dense", 2},
                      {"choice_us", "choice", 1},
                      {"waited_us", "waited", 1},
                      {"exposed_us", "exposed", 1},
                      {"link_bytes", "link B"},
                      {"exposed_bytes", "exposed B"},
                      {"goal_us", "goal", 1},
                      {"layer_over_goal", "x goal", 2},
                      {"attended_share", "attended", 2, Show::percent},
                      {"near_hit_share", "near", 1, Show::percent},
                      {"fetched_share", "fetched", 2, Show::percent},
                      {"promoted", "promoted", 1},
                      {"coverage_mean", "coverage", 4},
                      {"bypassed_share", "bypassed", 1, Show::percent}}};
}

class PipelineBench {
 public:
  PipelineBench(GpuRig& rig, std::vector<GpuCase> cases)
      : rig_(rig),
        options_(rig.options()),
        cases_(std::move(cases)),
        prefetch_(parse_prefetch(options_.prefetch)),
        table_(empty_table(rig.rates().link_gbps)) {}

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, cases_.size(), std::to_string(length) + " tokens: building");
    std::size_t done = 0;
    const auto use = [&](const SyntheticLayer& layer, const DeviceSteps& steps, const std::vector<GpuCase>& cases) {
      const std::map<std::uint32_t, double> dense_us = rig_.time_dense(length, cases, layer, steps);
      rig_.require_dense(length, cases.front(), layer, steps);
      for (const GpuCase& each : cases) {
        bar.update(done++, cases_.size(), std::to_string(length) + " tokens: " + each.policy);
        run(length, each, layer, steps, dense_us.at(each.rows));
      }
    };
    rig_.for_each_layer(length, options_.warm_up + options_.steps + kTraced, cases_, use);
  }
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  void run(std::uint32_t length, const GpuCase& given, const SyntheticLayer& layer, const DeviceSteps& steps,
           double dense_us) {
    const GpuCase each = rig_.limited(length, given, layer.options().layout.page_tokens);
    const AuditReport audited = rig_.audit(length, each, layer, steps, 1);  // Layers are alike.
    std::optional<Measured> first;
    for (const bool prefetch : prefetch_) {
      const Measured measured = measure(length, each, prefetch, layer, steps);
      if (first) require_same(*first, measured, each.policy);
      add(length, each, prefetch, measured, audited, dense_us);
      if (!first) first = measured;
    }
  }

  [[nodiscard]] Measured measure(std::uint32_t length, const GpuCase& each, bool prefetch, const SyntheticLayer& layer,
                                 const DeviceSteps& steps) const {
    std::vector<PipelineTimes> traced;
    SyntheticForwardsOptions options = rig_.forwards_of(length, each);
    if (!prefetch) options.promotions = 0;
    options.on_trace = [&](const ForwardTrace& trace) {
      if (trace.done && trace.dropped == 0) traced.push_back(pipeline_times(trace, options_.layers));
    };
    SyntheticForwards forwards(options, layer, steps, rig_.device());
    const bool graph = can_capture(*rig_.device(), options_.handover);
    forwards.trace(false);
    (void)forwards.time(options_.warm_up, graph);
    const EngineStats before = forwards.engine().stats();
    Measured measured;
    measured.layer_us = percentile(forwards.time(options_.steps, graph), 0.5);
    measured.stats = since(before, forwards.engine().stats());
    forwards.trace(true);
    (void)forwards.time(kTraced, graph);
    measured.out = forwards.out();
    if (scheduler::chooser(each.spec) == scheduler::Chooser::cpu && !traced.empty()) measured.times = median(traced);
    return measured;
  }

  /// What is selected does not depend on what lies near.
  static void require_same(const Measured& a, const Measured& b, const std::string& policy) {
    if (a.attended() != b.attended() || !(relative_error(b.out, a.out) <= kGpuTolerance))
      throw Error(Errc::device, "bench gpu: with and without prefetch '" + policy +
                                    "' does not attend the same tokens; nothing of it is shown");
  }

  void add(std::uint32_t length, const GpuCase& each, bool prefetch, const Measured& measured,
           const AuditReport& audited, double dense_us) {
    const AttentionShape& shape = rig_.shape();
    const EngineStats& stats = measured.stats;
    const double layers = static_cast<double>(options_.steps) * options_.layers;
    const double tokens = rig_.mean_length(each.rows, length) + options_.warm_up + 0.5 * options_.steps;
    const double all = layers * each.rows * shape.kv_heads * tokens;
    const auto share = [&](std::uint64_t part, double of) { return of == 0.0 ? 0.0 : static_cast<double>(part) / of; };
    const PageLayout layout{
        .page_tokens = options_.page_tokens, .head_dim = shape.head_dim, .dtype = options_.kv_dtype};
    const double token_bytes = static_cast<double>(layout.page_bytes()) / layout.page_tokens;
    const double link_bytes = token_bytes * static_cast<double>(stats.fetched_tokens + stats.promoted) / layers;
    std::vector<Json> row{
        length, each.policy, each.rows, prefetch ? "on" : "off", measured.layer_us, dense_us / measured.layer_us};
    append_parts(measured, link_bytes, row);
    row.insert(
        row.end(),
        {share(measured.attended(), all), share(stats.near_tokens, static_cast<double>(measured.attended())),
         share(stats.fetched_tokens, all), share(stats.promoted, layers * shape.kv_heads), audited.coverage.mean(),
         share(audited.bypassed_heads, static_cast<double>(audited.tokens) * shape.q_heads)});
    table_.rows.push_back(std::move(row));
  }

  /// Of what the CPU attends itself (`lsh | sampled`) the goal knows nothing.
  void append_parts(const Measured& measured, double link_bytes, std::vector<Json>& row) {
    if (!measured.times) {
      row.insert(row.end(), {Json(), Json(), Json(), link_bytes, Json(), Json(), Json()});
      return;
    }
    const PipelineTimes& times = *measured.times;
    row.insert(row.end(), {times.choice_us, times.waited_us, times.exposed_us, link_bytes});
    if (measured.stats.far_tokens != 0) {
      row.insert(row.end(), {Json(), Json(), Json()});
      return;
    }
    const PipelineGoal goal = pipeline_goal(times, link_bytes, rig_.rates().link_gbps);
    row.insert(row.end(), {goal.exposed_bytes, goal.us, measured.layer_us / goal.us});
  }

  GpuRig& rig_;
  const BenchGpuOptions& options_;
  std::vector<GpuCase> cases_;
  std::vector<bool> prefetch_;
  Table table_;
};

}  // namespace

std::vector<bool> parse_prefetch(const std::string& text) {
  std::vector<bool> all;
  for (const std::string& word : split_list(text, "--prefetch")) {
    if (word != "on" && word != "off")
      throw Error(Errc::invalid_argument, "--prefetch: '" + word + "' is neither on nor off; say on, off, or on,off");
    all.push_back(word == "on");
  }
  if (all.empty()) throw Error(Errc::invalid_argument, "--prefetch: nothing is listed; say on, off, or on,off");
  return all;
}

void bench_gpu_pipeline(GpuRig& rig, std::span<const std::uint32_t> lengths, std::vector<GpuCase> cases,
                        ProgressBar& bar, Report& report) {
  PipelineBench bench(rig, std::move(cases));
  report.config["gather_gbps"] = rig.rates().link_gbps;
  try {
    for (const std::uint32_t length : lengths) bench.run(length, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  report.tables.push_back(bench.take());
}

}  // namespace sluice::tools
