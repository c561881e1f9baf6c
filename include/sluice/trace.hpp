#pragma once

#include <cstdint>
#include <string>

#include "sluice/plan.hpp"

namespace sluice {

/// One node of the step graph as it ran, or one phase of a prompt: "prompt append", "prompt attention",
/// "prompt write-through", what else it took, and the work on indices and policies that follows.
struct TraceEvent {
  const char* name = "";       ///< static storage
  Lane lane = Lane::cpu;
  std::uint32_t layer = 0;
  std::uint64_t begin_ns = 0;  ///< Clock
  std::uint64_t end_ns = 0;
};

/// Receives every node and phase that runs. `record` is called from several threads at once and must not throw.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual void record(const TraceEvent& event) noexcept = 0;
};

}  // namespace sluice
