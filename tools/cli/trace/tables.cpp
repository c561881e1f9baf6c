// Traces of forwards in figures.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

/// A stage of one layer of one forward: from its first span to its last.
struct Stretch {
  double begin_us = 0.0;
  double end_us = 0.0;
  std::uint64_t bytes = 0;
};
using Stretches = std::map<std::pair<std::uint32_t, Stage>, Stretch>;  ///< by layer and stage

void widen(Stretches& stretches, std::uint32_t layer, Stage stage, const Stretch& by) {
  const auto [at, first] = stretches.try_emplace({layer, stage}, by);
  at->second.begin_us = std::min(at->second.begin_us, by.begin_us);
  at->second.end_us = std::max(at->second.end_us, by.end_us);
}

/// A stage over layers and forwards.
struct StageTotal {
  std::uint64_t layers = 0;
  double us = 0.0;
  std::uint64_t bytes = 0;
  std::uint64_t planned_layers = 0;
  double planned_us = 0.0;
};
using StageKey = std::pair<std::string, Stage>;  ///< kind of forward, stage

void add_measured(const std::string& kind, const ForwardTrace& trace, std::map<StageKey, StageTotal>& totals) {
  Stretches layers;
  for (const TraceSpan& span : trace.spans)
    widen(layers, span.layer, span.stage, {span.begin_us, span.end_us, span.bytes});
  for (const auto& [at, stretch] : layers) {
    StageTotal& total = totals[{kind, at.second}];
    ++total.layers;
    total.us += stretch.end_us - stretch.begin_us;
    total.bytes += stretch.bytes;
  }
}

void add_planned(const std::string& kind, const ForwardTrace& trace, const scheduler::LaneRates& rates,
                 std::map<StageKey, StageTotal>& totals) {
  const std::vector<scheduler::PlannedTime> times = scheduler::estimate(trace.work, rates);
  Stretches layers;
  for (std::size_t i = 0; i < times.size(); ++i)
    widen(layers, trace.work[i].layer, trace.work[i].stage, {times[i].begin_us, times[i].end_us});
  for (const auto& [at, stretch] : layers) {
    StageTotal& total = totals[{kind, at.second}];
    ++total.planned_layers;
    total.planned_us += stretch.end_us - stretch.begin_us;
  }
}

struct StallTotal {
  std::uint64_t stalls = 0;
  double us = 0.0;
};
/// Kind of forward, who waits, for whom, and why.
using StallKey = std::tuple<std::string, Actor, Actor, StallCause>;

/// From the plan to the end of what ran.
double length_us(const ForwardTrace& trace) noexcept {
  double end_us = 0.0;
  for (const TraceSpan& span : trace.spans) end_us = std::max(end_us, span.end_us);
  return end_us;
}

Json mean(double sum, std::uint64_t count) { return count == 0 ? Json() : Json(sum / static_cast<double>(count)); }

}  // namespace

Table TraceLog::stages(const scheduler::LaneRates& rates) const {
  std::map<StageKey, StageTotal> totals;
  for (const auto& [kind, trace] : entries_) {
    add_measured(kind, trace, totals);
    if (trace.done) add_planned(kind, trace, rates, totals);
  }
  Table table{.key = "trace_stages",
              .title = "Stages of a layer (mean over layers and traced forwards; planned: by the cost model)",
              .columns = {{"forward", "forward"},
                          {"stage", "stage"},
                          {"lane", "lane"},
                          {"layers", "layers"},
                          {"us", "us", 2},
                          {"planned_us", "planned us", 2},
                          {"bytes", "bytes", 0}}};
  for (const auto& [key, total] : totals) {
    if (total.layers == 0) continue;
    table.rows.push_back({key.first, to_string(key.second), to_string(lane_of(key.second)), total.layers,
                          mean(total.us, total.layers), mean(total.planned_us, total.planned_layers),
                          mean(static_cast<double>(total.bytes), total.layers)});
  }
  return table;
}

Table TraceLog::stalls() const {
  std::map<StallKey, StallTotal> totals;
  std::map<std::string, StallTotal> forwards;  // By kind: how many, and how long.
  for (const auto& [kind, trace] : entries_) {
    ++forwards[kind].stalls;
    forwards[kind].us += length_us(trace);
    for (const TraceStall& stall : trace.stalls) {
      StallTotal& total = totals[{kind, stall.actor, waited_for(stall.cause), stall.cause}];
      ++total.stalls;
      total.us += stall.end_us - stall.begin_us;
    }
  }
  Table table{.key = "trace_stalls",
              .title = "Who waited for whom with nothing else to do",
              .columns = {{"forward", "forward"},
                          {"actor", "who"},
                          {"waited_for", "waited for"},
                          {"cause", "cause"},
                          {"stalls", "stalls"},
                          {"us_per_forward", "us per forward", 1},
                          {"share", "of the forward", 1, Column::Show::percent}}};
  for (const auto& [key, total] : totals) {
    const auto& [kind, actor, of, cause] = key;
    const StallTotal& all = forwards[kind];
    table.rows.push_back({kind, to_string(actor), to_string(of), to_string(cause), total.stalls,
                          mean(total.us, all.stalls), all.us == 0.0 ? Json() : Json(total.us / all.us)});
  }
  return table;
}

std::string TraceLog::tell(const scheduler::LaneRates& rates, std::vector<Table>& tables) const {
  tables.push_back(stages(rates));
  tables.push_back(stalls());
  return to_chrome(rates);
}

}  // namespace sluice::tools
