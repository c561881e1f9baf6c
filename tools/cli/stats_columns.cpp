#include "tools/cli/stats_columns.hpp"

namespace sluice::tools {
namespace {

/// Quotient, null when there is nothing to divide by.
Json over(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? Json() : Json(static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

bool offloaded(const Stats& stats) noexcept {
  return stats.far_tokens != 0 || stats.fetched_tokens != 0;
}

void append_stats(const Stats& stats, const AttentionShape& shape, std::vector<Column>& columns,
                  std::vector<Json>& row) {
  const auto add = [&](Column column, Json value) {
    columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  using Show = Column::Show;
  const std::uint64_t head_steps = stats.steps * shape.layers * shape.kv_heads;
  const bool all_near = !offloaded(stats);
  const bool audited = stats.coverage.count() != 0;
  // A source without per-head candidates, such as `all`, has nothing to report here.
  const bool proposed = stats.expanded_per_head != 0;
  add({"attended_per_head_step", "attended", 1}, over(stats.attended_tokens, head_steps));
  add({"scored_per_head_step", "scored", 1, Show::plain, stats.scored_keys == 0}, over(stats.scored_keys, head_steps));
  add({"estimated_per_head_step", "estimated", 1, Show::plain, stats.estimated_keys == 0},
      over(stats.estimated_keys, head_steps));
  add({"expanded_share", "candidates", 2, Show::percent},
      proposed ? over(stats.expanded_per_head, stats.dense_tokens * shape.group()) : Json());
  add({"attended_share", "of dense", 1, Show::percent}, over(stats.attended_tokens, stats.dense_tokens));
  add({"near_bytes_share", "near bytes", 1, Show::percent, all_near}, over(stats.near_bytes, stats.dense_bytes));
  add({"far_bytes_share", "far bytes", 1, Show::percent, all_near}, over(stats.far_bytes, stats.dense_bytes));
  add({"near_hit_share", "near hits", 1, Show::percent, all_near}, over(stats.near_hits, stats.candidate_tokens));
  add({"coverage_mean", "coverage", 4}, audited ? Json(stats.coverage.mean()) : Json());
  add({"coverage_p5", "cov. p5", 3}, audited ? Json(stats.coverage.percentile(0.05)) : Json());
  add({"overlap_mean", "overlap", 3}, audited ? Json(stats.overlap.mean()) : Json());
  add({"answer_coverage", "answer", 3}, stats.watched.count() != 0 ? Json(stats.watched.mean()) : Json());
  add({"bypassed_share", "bypassed", 1, Show::percent},
      stats.bypassed_heads != 0 ? over(stats.bypassed_heads, head_steps * shape.group()) : Json());
  const std::uint64_t layer_steps = stats.steps * shape.layers;
  add({"layer_us", "us/layer", 1},
      layer_steps == 0 ? Json()
                       : Json(static_cast<double>(stats.cpu_busy_ns + stats.device_wait_ns) * 1e-3 /
                              static_cast<double>(layer_steps)));
}

}  // namespace sluice::tools
