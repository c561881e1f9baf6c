#include "tools/cli/bench/gpu_table.hpp"

#include <algorithm>
#include <utility>

#include "tools/cli/text/values.hpp"

namespace sluice::tools {

GpuTable::GpuTable() {
  using Show = Column::Show;
  table_ = {.key = "attention",
            .title = "Forwards of an engine per layer (median; dense: one launch for all rows, in HBM, same run)",
            .columns = {{"length_tokens", "length"},
                        {"method", "method"},
                        {"placement", "placement"},
                        {"rows", "rows"},
                        {"mode", "mode"},
                        {"layer_us", "us/layer", 1},
                        {"layer_p95_us", "p95", 1},
                        {"layer_p99_us", "p99", 1},
                        {"layer_most_us", "most", 1},
                        {"worst_repeat_us", "worst", 1},
                        {"calling_us", "calling", 1},
                        {"waited_us", "waited", 1},
                        {"answer_us", "answer", 1},
                        {"dense_us", "dense", 1},
                        {"speedup_over_dense", "x dense", 2},
                        {"coverage_mean", "coverage", 4},
                        {"coverage_p5", "p5", 4},
                        {"output_error", "error", 4},
                        {"near_share", "near", 2, Show::percent},
                        {"far_share", "far", 2, Show::percent},
                        {"far_budget_tokens", "far budget"},
                        {"fetched_share", "fetched", 2, Show::percent},
                        {"promoted", "promoted", 1},
                        {"missed_heads", "missed", 2},
                        {"device_bytes_share", "device B", 1, Show::percent},
                        {"scored_share", "scored", 2, Show::percent}}};
}

void GpuTable::add_dense(std::uint32_t length, std::uint32_t rows, double dense_us) {
  std::vector<Json> row(table_.columns.size());
  const auto set = [&](std::string_view key, Json value) {
    const auto at = std::ranges::find(table_.columns, key, &Column::key);
    row[static_cast<std::size_t>(at - table_.columns.begin())] = std::move(value);
  };
  set("length_tokens", length);
  set("method", "dense in HBM");
  set("rows", rows);
  set("layer_us", dense_us);
  set("dense_us", dense_us);
  for (const char* key : {"speedup_over_dense", "coverage_mean", "coverage_p5"}) set(key, 1.0);
  table_.rows.push_back(std::move(row));
}

void GpuTable::add(const GpuRow& row) {
  const double layers = static_cast<double>(row.steps) * row.layers;
  const double all = layers * row.rows * row.kv_heads * row.mean_tokens;
  const auto per_layer_us = [&](std::uint64_t ns) { return 1e-3 * static_cast<double>(ns) / layers; };
  const auto share = [&](std::uint64_t tokens) { return static_cast<double>(tokens) / all; };
  const double median = percentile(row.layer_us, 0.5);
  table_.rows.push_back({row.length,
                         row.policy,
                         row.placement,
                         row.rows,
                         row.graph ? "graph" : "enqueued",
                         median,
                         percentile(row.layer_us, 0.95),
                         percentile(row.layer_us, 0.99),
                         percentile(row.layer_us, 1.0),
                         row.worst_us,
                         percentile(row.calling_us, 0.5),
                         per_layer_us(row.stats.waited_ns),
                         per_layer_us(row.stats.answer_ns),
                         row.dense_us,
                         row.dense_us / median,
                         row.audited->coverage.mean(),
                         row.audited->coverage.percentile(0.05),
                         row.output_error,
                         share(row.stats.near_tokens),
                         share(row.stats.far_tokens),
                         row.far_budget,
                         share(row.stats.fetched_tokens),
                         static_cast<double>(row.stats.promoted) / (layers * row.kv_heads),
                         static_cast<double>(row.stats.missed) / layers,
                         static_cast<double>(row.memory.device()) / static_cast<double>(row.memory.far_pages),
                         share(row.stats.scored)});
}

}  // namespace sluice::tools
