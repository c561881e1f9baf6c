#include "tools/cli/plan/case_times.hpp"

#include <algorithm>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/graph.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kTracedForwards = 12;

/// Samples of one stage, of one traced forward each.
struct StageSamples {
  std::vector<double> us, bytes;
};
using Samples = std::array<StageSamples, kStages>;

/// Means over the forward's layers. What the device waits for is in the stage that waits.
void add(const ForwardTrace& trace, std::uint32_t layers, bool streams, Samples& samples) {
  std::array<double, kStages> us{}, bytes{};
  std::array<bool, kStages> ran{};
  for (const TraceSpan& span : trace.spans) {
    if (span.lane == Lane::cpu) continue;
    us[static_cast<std::size_t>(span.stage)] += span.end_us - span.begin_us;
    ran[static_cast<std::size_t>(span.stage)] = true;
  }
  for (const WorkItem& item : trace.work) {
    if (item.lane == lane_of(item.stage))
      bytes[static_cast<std::size_t>(item.stage)] += static_cast<double>(item.bytes());
  }
  const bool fetches = streams && ran[static_cast<std::size_t>(Stage::fetch)];
  double& waiting = us[static_cast<std::size_t>(fetches ? Stage::fetch : Stage::merge)];
  for (const TraceStall& stall : trace.stalls) {
    if (stall.actor == Actor::device && waited_for(stall.cause) == Actor::workers)
      waiting -= stall.end_us - stall.begin_us;
  }
  for (std::uint32_t i = 0; i < kStages; ++i) {
    if (!ran[i]) continue;
    samples[i].us.push_back(us[i] / layers);
    samples[i].bytes.push_back(bytes[i] / layers);
  }
}

}  // namespace

double scored_share(const PolicySpec& policy, double counted) noexcept {
  if (policy.uses(Source::labels)) return 1.0;  // Their channels are read of every token, which is not counted.
  return counted == 0.0 && scheduler::chooser(policy) == scheduler::Chooser::cpu ? 1.0 : counted;
}

CaseTimes time_case(SyntheticForwardsOptions options, const SyntheticLayer& layer, const DeviceSteps& steps,
                    const std::shared_ptr<Device>& device, std::uint32_t warm_up) {
  const bool graph = can_capture(*device, options.handover);
  const std::uint32_t timed = layer.options().steps - warm_up;
  const PageLayout& layout = layer.options().layout;
  CaseTimes times{.rows = options.rows};
  {
    SyntheticForwards forwards(options, layer, steps, device);
    (void)forwards.time(warm_up, graph);
    const EngineStats before = forwards.engine().stats();
    times.layer_us = percentile(forwards.time(timed, graph), 0.5);
    const EngineStats stats = since(before, forwards.engine().stats());
    const auto per_layer = [&](std::uint64_t count) {
      return static_cast<double>(count) / (static_cast<double>(timed) * options.layers);
    };
    times.waited_us = 1e-3 * per_layer(stats.waited_ns);
    times.answer_us = 1e-3 * per_layer(stats.answer_ns);
    times.far_bytes = 2.0 * static_cast<double>(layout.row_bytes()) * per_layer(stats.far_tokens);
    const double tokens = layer.options().tokens + warm_up + 0.5 * timed;
    const double all = tokens * options.rows * layer.options().shape.kv_heads;
    times.scored_share = scored_share(options.policy, per_layer(stats.scored) / all);
    times.scored_bytes = static_cast<double>(layout.row_bytes()) * all * times.scored_share;
  }  // One engine after the other, so that only one holds memory.
  Samples samples;
  bool warm = false;
  options.on_trace = [&](const ForwardTrace& trace) {
    if (warm && trace.done) add(trace, options.layers, options.placement == PlacementMode::stream, samples);
  };
  SyntheticForwards forwards(options, layer, steps, device);
  (void)forwards.time(warm_up, graph);
  warm = true;
  (void)forwards.time(std::min(kTracedForwards, timed), graph);
  for (std::uint32_t i = 0; i < kStages; ++i) {
    times.ran[i] = !samples[i].us.empty();
    times.stage_us[i] = percentile(samples[i].us, 0.5);
    times.stage_bytes[i] = percentile(samples[i].bytes, 0.5);
  }
  return times;
}

void correct(CaseTimes& times) {
  constexpr double kLeast = 0.1;  // Of what was stamped.
  const double wanted = times.layer_us - times.apart_us - times.waited_us;
  double stamped = 0.0;
  std::uint32_t stages = 0;
  for (std::uint32_t i = 0; i < kStages; ++i) {
    if (!times.ran[i]) continue;
    stamped += times.stage_us[i];
    ++stages;
  }
  if (stages == 0) return;
  const double each = (stamped - wanted) / stages;
  for (std::uint32_t i = 0; i < kStages; ++i) {
    if (times.ran[i]) times.stage_us[i] = std::max(kLeast * std::max(times.stage_us[i], 0.0), times.stage_us[i] - each);
  }
}

}  // namespace sluice::tools
