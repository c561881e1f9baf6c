// Traces of forwards as files that a browser draws.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "sluice/step/forward.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

/// Processes of the drawing, from top to bottom.
enum Process : int { kForwards = 1, kDevice, kLink, kCpu, kStalls, kPlan };

/// Behind the rows of threads.
constexpr std::uint32_t kLooks = 1u << 16;

int process_of(Lane lane) noexcept { return lane == Lane::device ? kDevice : lane == Lane::link ? kLink : kCpu; }

class Drawing {
 public:
  void name(int process, const char* name) {
    events_.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", process}, {"args", {{"name", name}}}});
    events_.push_back(
        {{"name", "process_sort_index"}, {"ph", "M"}, {"pid", process}, {"args", {{"sort_index", process}}}});
  }
  void name(int process, std::uint32_t row, const std::string& name) {
    if (!rows_.insert({process, row}).second) return;
    events_.push_back(
        {{"name", "thread_name"}, {"ph", "M"}, {"pid", process}, {"tid", row}, {"args", {{"name", name}}}});
  }
  void span(int process, std::uint32_t row, const char* name, double begin_us, double end_us, Json args) {
    events_.push_back({{"name", name},
                       {"ph", "X"},
                       {"pid", process},
                       {"tid", row},
                       {"ts", begin_us},
                       {"dur", end_us - begin_us},
                       {"args", std::move(args)}});
  }
  [[nodiscard]] std::string take() {
    return Json{{"displayTimeUnit", "ns"}, {"traceEvents", std::move(events_)}}.dump() + "\n";
  }

 private:
  Json events_ = Json::array();
  std::set<std::pair<int, std::uint32_t>> rows_;
};

/// What was measured.
void draw_run(const ForwardTrace& trace, const std::string& kind, double origin_us, Drawing& drawing) {
  double end_us = 0.0;
  for (const TraceSpan& span : trace.spans) {
    const bool cpu = span.lane == Lane::cpu;
    drawing.name(process_of(span.lane), span.thread, cpu ? "thread " + std::to_string(span.thread) : "stream");
    drawing.span(process_of(span.lane), span.thread, to_string(span.stage), origin_us + span.begin_us,
                 origin_us + span.end_us,
                 {{"forward", trace.forward}, {"layer", span.layer}, {"rows", span.rows}, {"bytes", span.bytes}});
    end_us = std::max(end_us, span.end_us);
  }
  for (const TraceStall& stall : trace.stalls) {
    const auto row = static_cast<std::uint32_t>(stall.actor);
    drawing.name(kStalls, row, to_string(stall.actor));
    Json args{{"forward", trace.forward}, {"for", to_string(waited_for(stall.cause))}};
    if (stall.layer != kNone) args["layer"] = stall.layer;
    drawing.span(kStalls, row, to_string(stall.cause), origin_us + stall.begin_us, origin_us + stall.end_us,
                 std::move(args));
  }
  for (const TraceLook& look : trace.looks) {
    drawing.name(kCpu, kLooks, "prompts");
    drawing.span(kCpu, kLooks, "look", origin_us + look.begin_us, origin_us + look.end_us,
                 {{"forward", trace.forward}, {"sequence", look.sequence}});
  }
  // Those in flight overlap: each has a row of its own.
  const auto row = static_cast<std::uint32_t>(trace.forward % kMostForwards);
  drawing.span(kForwards, row, kind.c_str(), origin_us, origin_us + end_us,
               {{"forward", trace.forward},
                {"done", trace.done},
                {"clock_error_us", trace.clock_error_us},
                {"dropped", trace.dropped}});
}

/// What the plan says, from when the forward's first stage began.
void draw_plan(const ForwardTrace& trace, const scheduler::LaneRates& rates, double origin_us, Drawing& drawing) {
  if (trace.spans.empty()) return;
  origin_us += trace.spans.front().begin_us;
  const std::vector<scheduler::PlannedTime> times = scheduler::estimate(trace.work, rates);
  for (std::size_t i = 0; i < times.size(); ++i) {
    const WorkItem& item = trace.work[i];
    const auto row = static_cast<std::uint32_t>(item.lane);
    drawing.name(kPlan, row, to_string(item.lane));
    drawing.span(kPlan, row, to_string(item.stage), origin_us + times[i].begin_us, origin_us + times[i].end_us,
                 {{"forward", trace.forward},
                  {"layer", item.layer},
                  {"rows", item.rows},
                  {"read", item.read},
                  {"written", item.written}});
  }
}

}  // namespace

std::string TraceLog::to_chrome(const scheduler::LaneRates& rates) const {
  Drawing drawing;
  constexpr std::pair<Process, const char*> kNames[] = {{kForwards, "forwards"}, {kDevice, "device"}, {kLink, "link"},
                                                        {kCpu, "cpu"},           {kStalls, "stalls"}, {kPlan, "plan"}};
  for (const auto& [process, name] : kNames) drawing.name(process, name);
  for (const auto& [kind, trace] : entries_) {
    const double origin_us =
        std::chrono::duration<double, std::micro>(trace.planned - entries_.front().trace.planned).count();
    draw_run(trace, kind, origin_us, drawing);
    draw_plan(trace, rates, origin_us, drawing);
  }
  return drawing.take();
}

}  // namespace sluice::tools
