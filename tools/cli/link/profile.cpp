// What a calibration decides: which path for which batch, and how many thread blocks gather.
#include <array>

#include "tools/cli/link/machine.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/link/calibrate.hpp"

namespace sluice::tools {
namespace {

constexpr std::array<std::uint32_t, 5> kCounts{4, 16, 64, 256, 1024};

std::vector<std::vector<GatherRate>> gather_rates(LinkMachine& machine, TransferLoad load, Table& table) {
  const bool busy = load == TransferLoad::busy;
  std::vector<std::vector<GatherRate>> columns;
  for (const bool to_device : {true, false}) {
    for (const std::uint64_t block_bytes : {4 * KiB, 16 * KiB, 64 * KiB}) {
      table.columns.push_back(
          {(busy ? std::string("busy_") : "") + (to_device ? "h2d_" : "d2h_") + std::to_string(block_bytes) + "_gbps",
           (busy ? std::string("busy, ") : "") + (to_device ? "to device, " : "to host, ") + format_size(block_bytes),
           1});
      columns.push_back(sweep_gather_blocks(machine.bench, to_device, block_bytes, machine.options.samples));
    }
  }
  return columns;
}

}  // namespace

void link_profile(LinkMachine& machine, LinkFindings& findings) {
  Table table{.key = "profile",
              .title = "What `auto` takes by the profile, by the number of blocks",
              .columns = {{"direction", "way"}, {"load", "device"}, {"block_bytes", "block"}}};
  for (const std::uint32_t blocks : kCounts)
    table.columns.push_back({"blocks_" + std::to_string(blocks), std::to_string(blocks)});
  for (const bool to_device : {true, false}) {
    for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
      for (const std::uint64_t block_bytes : kCalibratedBlockBytes) {
        std::vector<Json> row{to_device ? "h2d" : "d2h", to_string(load), block_bytes};
        for (const std::uint32_t blocks : kCounts)
          row.push_back(to_string(machine.device.chooser().choose({.load = load,
                                                                   .to_device = to_device,
                                                                   .may_stage = true,
                                                                   .block_bytes = block_bytes,
                                                                   .blocks = blocks})));
        table.rows.push_back(std::move(row));
      }
    }
  }
  findings.tables.push_back(std::move(table));
}

void link_gather(LinkMachine& machine, LinkFindings& findings) {
  Table table{.key = "gather",
              .title = "Gather kernel by its thread blocks, GB/s",
              .columns = {{"gather_blocks", "thread blocks"}}};
  auto columns = gather_rates(machine, TransferLoad::idle, table);
  const std::uint32_t fewest = fewest_gather_blocks(columns[1]);
  {
    MemoryTraffic traffic(machine.device);
    machine.bench.run_beside(&traffic);
    for (auto& column : gather_rates(machine, TransferLoad::busy, table)) columns.push_back(std::move(column));
    machine.bench.run_beside(nullptr);
  }
  for (std::size_t i = 0; i < columns.front().size(); ++i) {
    std::vector<Json> row{columns.front()[i].gather_blocks};
    for (const auto& column : columns) row.push_back(column[i].gbps);
    table.rows.push_back(std::move(row));
  }
  findings.tables.push_back(std::move(table));
  findings.verdict.push_back("the gather kernel needs " + std::to_string(fewest) +
                             " thread blocks for pages of 16K; more only take multiprocessors from attention");
}

}  // namespace sluice::tools
