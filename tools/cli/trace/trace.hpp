#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/device.hpp"
#include "sluice/trace.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// `--trace FILE`.
void add_trace(CLI::App& app, std::string& path);

/// Forwards that were traced, in the order in which they were planned.
class TraceLog {
 public:
  /// Of one kind of forward, such as "decode", the newest this many are kept.
  static constexpr std::size_t kMost = 32;

  void add(std::string kind, ForwardTrace trace);

  /// As the Trace Event format has it, which chrome://tracing and ui.perfetto.dev show: a process per lane with a row
  /// per thread, one of waits with a row for each who waits, one of what the plan made of the machine's rates, and one
  /// of the forwards.
  [[nodiscard]] std::string to_chrome(const scheduler::LaneRates& rates) const;
  /// Time of each stage of a layer, measured and planned: mean over layers and forwards.
  [[nodiscard]] Table stages(const scheduler::LaneRates& rates) const;
  /// Who waited for whom, by cause: per forward, and as a share of the time from plans to ends.
  [[nodiscard]] Table stalls() const;
  /// The first of these, for a file that is written behind the report: what was measured must not be lost with it. And
  /// both tables behind those of a report.
  [[nodiscard]] std::string tell(const scheduler::LaneRates& rates, std::vector<Table>& tables) const;

 private:
  struct Entry {
    std::string kind;
    ForwardTrace trace;
  };
  std::deque<Entry> entries_;
};

/// Of this machine: what the device knows of itself for pages of this size (null: the embedded device), and how fast
/// this many threads read memory; 0: as many as there are cores.
[[nodiscard]] scheduler::LaneRates measured_rates(const Device* device, std::uint64_t page_bytes,
                                                  std::uint32_t threads);

}  // namespace sluice::tools
