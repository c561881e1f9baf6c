#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/audit.hpp"
#include "sluice/engine.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What `sluice bench gpu` has timed of one policy, in one way of running it.
struct GpuRow {
  std::uint32_t length = 0;  ///< tokens of each sequence when it began
  std::string policy;
  Json far_budget{};  ///< far tokens that it may attend in a layer; null: as many as it likes
  std::string placement;
  std::uint32_t rows = 1;  ///< sequences of a forward
  bool graph = false;
  std::uint32_t layers = 1;  ///< of a forward
  std::uint32_t steps = 1;   ///< timed forwards
  std::uint32_t kv_heads = 1;
  PageLayout layout{};               ///< of far pages
  std::uint32_t verbs = 0;           ///< of a layer
  double graph_nodes = 0.0;          ///< likewise, of the graph
  double mean_tokens = 0.0;          ///< of a sequence in the timed forwards
  std::vector<double> layer_us{};    ///< [steps] time of a forward, divided by its layers
  double worst_us = 0.0;             ///< median of the slowest of several such runs, of which this is the middle one
  std::vector<double> calling_us{};  ///< [steps] of that, what the calling thread worked
  double dense_us = 0.0;             ///< of the same rows, in device memory
  double output_error = 0.0;         ///< of the first step, relative to dense attention
  EngineStats stats{};               ///< of the timed forwards
  EngineMemoryUse memory{};
  std::uint32_t code_bits = 4;           ///< see EngineSizes
  const AuditReport* audited = nullptr;  ///< of the same forwards, run again
};

/// The table of `sluice bench gpu`: forwards of an engine beside dense attention in device memory.
class GpuTable {
 public:
  GpuTable();
  void add_dense(std::uint32_t length, std::uint32_t rows, double dense_us);
  void add(const GpuRow& row);
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  Table table_;
};

}  // namespace sluice::tools
