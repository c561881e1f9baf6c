#include "tools/cli/trace/trace.hpp"

#include <algorithm>
#include <utility>

#include <CLI/CLI.hpp>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/rates.hpp"
#include "cpu/threads/workers.hpp"

namespace sluice::tools {

void add_trace(CLI::App& app, std::string& path) {
  app.add_option("--trace", path,
                 "Write when the stages of the newest forwards ran to FILE, for chrome://tracing or ui.perfetto.dev; "
                 "traced forwards take longer")
      ->type_name("FILE");
}

void TraceLog::add(std::string kind, ForwardTrace trace) {
  const auto same = [&](const Entry& entry) { return entry.kind == kind; };
  if (static_cast<std::size_t>(std::ranges::count_if(entries_, same)) >= kMost)
    entries_.erase(std::ranges::find_if(entries_, same));
  entries_.push_back({.kind = std::move(kind), .trace = std::move(trace)});
}

scheduler::LaneRates measured_rates(const Device* device, std::uint64_t page_bytes, std::uint32_t threads) {
  constexpr std::uint64_t kReadBytes = 128 * MiB;
  const cpu::Workers workers(cpu::Topology(), {.threads = threads});
  return scheduler::lane_rates(device == nullptr ? DeviceRates{} : device->rates(page_bytes),
                               cpu::measure_read_gbps(workers, kReadBytes));
}

}  // namespace sluice::tools
