#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "sluice/trace.hpp"

namespace sluice::tools {

/// Collects what ran, for chrome://tracing and ui.perfetto.dev: one track per lane, one slice per node.
/// An event that finds no memory is counted and dropped, because `record` may not throw.
class TraceFile final : public TraceSink {
 public:
  void record(const TraceEvent& event) noexcept override;

  /// Trace Event Format (JSON object form); times in microseconds since the first event.
  [[nodiscard]] std::string json() const;
  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
  std::atomic<std::uint64_t> dropped_{0};
};

}  // namespace sluice::tools
