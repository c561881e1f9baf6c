#include "tools/cli/bench/cost_table.hpp"

#include <algorithm>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/step/int4.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void CostTable::add_dense(double bytes, double us) { bytes_per_us_ = std::max(bytes_per_us_, bytes / us); }

std::vector<Json> CostTable::cells(const GpuRow& row) const {
  const double layers = static_cast<double>(row.steps) * row.layers;
  const auto reads_us = [&](std::uint64_t count, std::uint64_t bytes) {
    return static_cast<double>(count) * static_cast<double>(bytes) / (layers * bytes_per_us_);
  };
  const std::uint64_t near_bytes = 2 * row.layout.near().row_bytes();
  const std::uint64_t copy_bytes = CodeLayout(row.layout, row.code_bits).row_bytes() + CodeLayout::kParamBytes;
  const double layer_us = percentile(row.layer_us, 0.5);
  const double scan_us = reads_us(row.stats.estimated, copy_bytes) + reads_us(row.stats.ranked_pages, near_bytes);
  const double near_us = reads_us(row.stats.near_tokens, near_bytes);
  const double far_us = 1e-3 * static_cast<double>(row.stats.answer_ns) / layers;
  // What comes over the link is in no answer.
  const Json fixed_us = row.stats.fetched_tokens != 0 ? Json() : Json(layer_us - scan_us - std::max(near_us, far_us));
  return {row.length,
          row.policy,
          row.placement,
          row.rows,
          row.graph ? "graph" : "enqueued",
          row.verbs,
          row.graph ? Json(row.graph_nodes) : Json(),
          layer_us,
          scan_us,
          near_us,
          far_us,
          fixed_us,
          percentile(row.calling_us, 0.5),
          bytes_per_us_ / scheduler::kBytesPerUs};
}

Table CostTable::take() const {
  Table table{.key = "costs",
              .title = "What a layer takes beyond what it reads (fixed: less scan, less the longer of near and far)",
              .columns = {{"length_tokens", "length"},
                          {"method", "method"},
                          {"placement", "placement"},
                          {"rows", "rows"},
                          {"mode", "mode"},
                          {"verbs", "verbs"},
                          {"graph_nodes", "graph nodes", 2},
                          {"layer_us", "us/layer", 1},
                          {"scan_us", "scan", 1},
                          {"near_us", "near", 1},
                          {"far_us", "far", 1},
                          {"fixed_us", "fixed", 1},
                          {"calling_us", "calling", 1},
                          {"device_gbps", "read GB/s", 0}}};
  for (const GpuRow& row : rows_) table.rows.push_back(cells(row));
  return table;
}

}  // namespace sluice::tools
