#include "tools/cli/trace_file.hpp"

#include <algorithm>
#include <limits>
#include <new>

#include "tools/cli/report.hpp"

namespace sluice::tools {
namespace {

constexpr int kProcess = 1;

double microseconds(std::uint64_t ns) { return static_cast<double>(ns) / 1e3; }

}  // namespace

void TraceFile::record(const TraceEvent& event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  } catch (const std::bad_alloc&) {
    ++dropped_;
  }
}

std::string TraceFile::json() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t origin = std::numeric_limits<std::uint64_t>::max();
  for (const TraceEvent& event : events_) origin = std::min(origin, event.begin_ns);
  Json slices = Json::array();
  for (const Lane lane : {Lane::cpu, Lane::link, Lane::device}) {
    slices.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", kProcess},
                      {"tid", static_cast<int>(lane)},
                      {"args", {{"name", to_string(lane)}}}});
  }
  for (const TraceEvent& event : events_) {
    slices.push_back({{"name", event.name},
                      {"cat", to_string(event.lane)},
                      {"ph", "X"},
                      {"ts", microseconds(event.begin_ns - origin)},
                      {"dur", microseconds(event.end_ns - event.begin_ns)},
                      {"pid", kProcess},
                      {"tid", static_cast<int>(event.lane)},
                      {"args", {{"layer", event.layer}}}});
  }
  return Json{{"displayTimeUnit", "ns"}, {"traceEvents", std::move(slices)}}.dump() + "\n";
}

}  // namespace sluice::tools
