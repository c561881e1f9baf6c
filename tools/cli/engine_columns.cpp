#include "tools/cli/engine_columns.hpp"

#include <iterator>
#include <utility>

#include "sluice/step/int4.hpp"

namespace sluice::tools {
namespace {

/// Quotient, null when there is nothing to divide by.
Json over(double part, double whole) { return whole == 0.0 ? Json() : Json(part / whole); }

constexpr std::uint64_t EngineStats::*kCounters[] = {
    &EngineStats::asked,          &EngineStats::unplanned,      &EngineStats::near_tokens, &EngineStats::far_tokens,
    &EngineStats::fetched_tokens, &EngineStats::promoted,       &EngineStats::scored,      &EngineStats::estimated,
    &EngineStats::ranked_pages,   &EngineStats::missed,         &EngineStats::waited_ns,   &EngineStats::answer_ns,
    &EngineStats::sparse_chunks,  &EngineStats::dense_chunks,   &EngineStats::kept_blocks, &EngineStats::causal_blocks,
    &EngineStats::matched_tokens, &EngineStats::evicted_blocks, &EngineStats::stalls,      &EngineStats::awaited,
    &EngineStats::drawn_heads,    &EngineStats::error_bars,     &EngineStats::wide_bars};
static_assert(sizeof(EngineStats) == std::size(kCounters) * sizeof(std::uint64_t), "a counter is missing");

}  // namespace

EngineStats since(const EngineStats& before, EngineStats after) noexcept {
  for (const auto counter : kCounters) after.*counter -= before.*counter;
  return after;
}

ReadShares read_shares(const DecodeScore& score, const AttentionShape& shape, const PageLayout& layout) {
  const EngineStats& stats = score.stats;
  const auto count = [](std::uint64_t value) { return static_cast<double>(value); };
  const double dense = count(score.dense_tokens) * shape.layers * shape.kv_heads;
  const auto row_bytes = count(layout.near().row_bytes());
  const double far_row_bytes = count(layout.page_bytes()) / (2 * layout.page_tokens);
  const double copy_bytes = count(CodeLayout(layout, score.code_bits).page_bytes()) / layout.page_tokens;
  const double dense_bytes = 2 * row_bytes * dense;
  const double near = count(stats.near_tokens);
  const double far = count(stats.far_tokens);
  const double fetched = count(stats.fetched_tokens);
  return {.attended = (near + far + fetched) / dense,
          .near = 2 * row_bytes * near / dense_bytes,
          .far = far_row_bytes * (2 * far + count(stats.scored)) / dense_bytes,
          .link = 2 * far_row_bytes * fetched / dense_bytes,
          .choice = (2 * row_bytes * count(stats.ranked_pages) + copy_bytes * count(stats.estimated)) / dense_bytes};
}

void append_decode(const DecodeScore& score, const AttentionShape& shape, const PageLayout& layout,
                   std::vector<Column>& columns, std::vector<Json>& row) {
  const auto add = [&](Column column, Json value) {
    columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  using Show = Column::Show;
  const double planes = static_cast<double>(shape.layers) * shape.kv_heads;
  const double head_steps = static_cast<double>(score.tokens) * planes;
  const auto near = static_cast<double>(score.stats.near_tokens);
  const auto far = static_cast<double>(score.stats.far_tokens + score.stats.fetched_tokens);
  const ReadShares read = read_shares(score, shape, layout);
  const auto share = [&](double value) { return score.dense_tokens == 0 ? Json() : Json(value); };
  const AuditReport& audited = score.audited;
  add({"attended_per_head_step", "attended", 1}, over(near + far, head_steps));
  add({"attended_share", "of dense", 1, Show::percent}, share(read.attended));
  add({"near_hit_share", "near", 1, Show::percent}, over(near, near + far));
  add({"near_bytes_share", "near bytes", 1, Show::percent}, share(read.near + read.choice));
  add({"far_bytes_share", "far bytes", 1, Show::percent}, share(read.far));
  add({"link_bytes_share", "link bytes", 1, Show::percent, score.stats.fetched_tokens == 0}, share(read.link));
  add({"scored_per_head_step", "scored", 1, Show::plain, score.stats.scored == 0},
      over(static_cast<double>(score.stats.scored), head_steps));
  add({"estimated_per_head_step", "estimated", 1, Show::plain, score.stats.estimated == 0},
      over(static_cast<double>(score.stats.estimated), head_steps));
  add({"promoted_per_head_step", "brought", 1}, over(static_cast<double>(score.stats.promoted), head_steps));
  add({"error_bar", "error bar", 4, Show::plain, score.stats.drawn_heads == 0},
      over(1e-6 * static_cast<double>(score.stats.error_bars), static_cast<double>(score.stats.drawn_heads)));
  const bool any = audited.coverage.count() != 0;
  add({"coverage_mean", "coverage", 4}, any ? Json(audited.coverage.mean()) : Json());
  add({"coverage_p5", "cov. p5", 3}, any ? Json(audited.coverage.percentile(0.05)) : Json());
  add({"overlap_mean", "overlap", 3}, any ? Json(audited.overlap.mean()) : Json());
  add({"bypassed_share", "bypassed", 1, Show::percent},
      audited.bypassed_heads != 0 ? over(static_cast<double>(audited.bypassed_heads),
                                         static_cast<double>(audited.tokens) * shape.layers * shape.q_heads)
                                  : Json());
}

void append_blocks(const EngineStats& stats, std::vector<Column>& columns, std::vector<Json>& row) {
  const auto share = [](std::uint64_t part, std::uint64_t whole, double none) {
    return whole == 0 ? none : static_cast<double>(part) / static_cast<double>(whole);
  };
  const bool chosen = stats.sparse_chunks != 0;
  columns.push_back({"blocks_share", "blocks computed", 1, Column::Show::percent, !chosen});
  row.push_back(share(stats.kept_blocks, stats.causal_blocks, 1.0));
  columns.push_back({"sparse_chunks_share", "chunks with a choice", 1, Column::Show::percent, !chosen});
  row.push_back(share(stats.sparse_chunks, stats.sparse_chunks + stats.dense_chunks, 0.0));
}

}  // namespace sluice::tools
