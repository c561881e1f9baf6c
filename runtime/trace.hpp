#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "sluice/trace.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// Reports work outside of step graphs. Nothing without a sink.
/// @param name  static storage
inline void trace(TraceSink* sink, const char* name, Lane lane, std::uint32_t layer, Clock::time_point begin,
                  Clock::time_point end) noexcept {
  if (sink == nullptr) return;
  const auto ns = [](Clock::time_point point) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(point.time_since_epoch()).count());
  };
  sink->record({.name = name, .lane = lane, .layer = layer, .begin_ns = ns(begin), .end_ns = ns(std::max(begin, end))});
}

}  // namespace sluice::runtime
