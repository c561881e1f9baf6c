#include "runtime/engine/forward_trace.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "runtime/engine/forward_stalls.hpp"

namespace sluice::runtime {
namespace {

std::uint32_t layers_of(const TraceNotes& notes) noexcept {
  return static_cast<std::uint32_t>(notes.stamps.size() / kStampedStages);
}

/// The stages of a layer in the order of its tasks: each began when the one before it ended.
std::vector<StageRun> stages_of_layer(const TraceNotes& notes, std::int64_t ahead_ns, const scheduler::TaskGraph& graph,
                                      std::uint32_t layer) {
  const std::span stamps = std::span(notes.stamps).subspan(std::size_t{layer} * kStampedStages, kStampedStages);
  std::vector<StageRun> ran;
  const ForwardStamp& start = stamps[static_cast<std::size_t>(Stage::start)];
  if (start.forward != notes.forward) return ran;
  std::int64_t begin = static_cast<std::int64_t>(start.ns) + ahead_ns;
  for (const scheduler::Task& task : graph.layer()) {
    const bool stamped = task.stamped || task.verb == scheduler::Verb::gather;
    if (!stamped || task.stage == Stage::start) continue;
    const ForwardStamp& stamp = stamps[static_cast<std::size_t>(task.stage)];
    if (stamp.forward != notes.forward) continue;
    const std::int64_t end = static_cast<std::int64_t>(stamp.ns) + ahead_ns;
    ran.push_back({.stage = task.stage, .begin_ns = std::exchange(begin, end), .end_ns = end});
  }
  return ran;
}

/// Rows and bytes of a stage of a layer as they are planned, on all lanes.
void add_plan(const std::vector<WorkItem>& work, TraceSpan& span) noexcept {
  for (const WorkItem& item : work) {
    if (item.layer != span.layer || item.stage != span.stage) continue;
    span.rows = item.rows;
    span.bytes += item.bytes();
  }
}

}  // namespace

ClockOffset align(const TraceNotes& notes) noexcept {
  std::int64_t low = INT64_MIN;
  std::int64_t high = INT64_MAX;
  const auto host_first = [&](std::int64_t host, std::int64_t device) { low = std::max(low, host - device); };
  const auto device_first = [&](std::int64_t device, std::int64_t host) { high = std::min(high, host - device); };
  const auto stamp = [&](std::uint32_t layer, Stage stage) {
    return notes.stamps[std::size_t{layer} * kStampedStages + static_cast<std::size_t>(stage)];
  };
  for (const ForwardStamp& each : notes.stamps) {
    if (each.forward != notes.forward) continue;
    host_first(ns_of(notes.planned), static_cast<std::int64_t>(each.ns));
    device_first(static_cast<std::int64_t>(each.ns), ns_of(notes.ended));
  }
  for (std::uint32_t layer = 0; layer < notes.far.answers.size(); ++layer) {
    const FarAnswer& answer = notes.far.answers[layer];
    if (answer.answered_ns == 0) continue;
    // The stage before `split`, which asks, is one of these.
    for (const Stage stage : {Stage::append, Stage::prefill, Stage::rank, Stage::choose}) {
      if (const ForwardStamp asked = stamp(layer, stage); asked.forward == notes.forward)
        device_first(static_cast<std::int64_t>(asked.ns), answer.seen_ns);
    }
    if (const ForwardStamp merged = stamp(layer, Stage::merge); merged.forward == notes.forward)
      host_first(answer.answered_ns, static_cast<std::int64_t>(merged.ns));
  }
  if (low == INT64_MIN) return {};
  return {.ahead_ns = low + (high - low) / 2, .error_ns = std::abs(high - low) / 2};
}

ForwardTrace trace_of(const TraceNotes& notes, const ClockOffset& offset, const scheduler::TaskGraph& graph,
                      std::vector<WorkItem> work, bool done) {
  ForwardTrace trace{.forward = notes.forward,
                     .done = done,
                     .planned = notes.planned,
                     .clock_error_us = 1e-3 * static_cast<double>(offset.error_ns),
                     .work = std::move(work),
                     .dropped = notes.far.dropped};
  const auto us = [&](std::int64_t ns) { return 1e-3 * static_cast<double>(ns - ns_of(notes.planned)); };
  const auto add = [&](TraceSpan span) {
    add_plan(trace.work, span);
    trace.spans.push_back(span);
  };
  for (const LookNote& look : notes.looks)
    trace.looks.push_back(
        {.sequence = look.sequence, .begin_us = us(ns_of(look.begin)), .end_us = us(ns_of(look.end))});
  std::vector<std::vector<StageRun>> layers;
  for (std::uint32_t layer = 0; layer < layers_of(notes); ++layer) {
    layers.push_back(stages_of_layer(notes, offset.ahead_ns, graph, layer));
    for (const StageRun& each : layers.back()) {
      add({.stage = each.stage,
           .lane = lane_of(each.stage),
           .layer = layer,
           .begin_us = us(each.begin_ns),
           .end_us = us(each.end_ns)});
    }
  }
  trace.stalls = stalls_of(notes, layers);
  for (const FarPiece& piece : notes.far.pieces) {
    add({.stage = piece.stage,
         .lane = Lane::cpu,
         .layer = piece.layer,
         .thread = piece.thread,
         .begin_us = us(piece.begin_ns),
         .end_us = us(piece.end_ns)});
  }
  return trace;
}

Clock::time_point end_of(const ForwardTrace& trace) noexcept {
  double end_us = 0.0;
  for (const TraceSpan& span : trace.spans) end_us = std::max(end_us, span.lane == Lane::cpu ? 0.0 : span.end_us);
  return trace.planned + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::micro>(end_us));
}

}  // namespace sluice::runtime
