#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {
namespace {

/// The new token itself is always attended.
std::uint32_t recent_of(const PolicySpec& spec) noexcept { return std::max(spec.near.recent_tokens, 1u); }

}  // namespace

std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, std::uint32_t max_window) {
  const bool all = spec.uses(Source::all);
  const bool ranks = !all && spec.sources != 0;
  if (ranks && (spec.sources != static_cast<std::uint8_t>(Source::exact) || spec.estimate != Estimate::int4))
    return "its sources are not `exact | int4`, `all` or `none`";
  if (ranks && spec.budget.kind != BudgetKind::top_k && spec.budget.kind != BudgetKind::top_p)
    return "its budget is neither top_k nor top_p";
  if (spec.near.share != 0.f && !all) return "it attends a share of pages near; say near=0";
  if (spec.bypass_threshold != 0.f) return "it bypasses heads; say bypass=off";
  const bool whole = all || spec.dense_layers != 0 || spec.dense_every != 0;
  if (!bucket.unbounded && whole) return "it attends everything in some layer; say so by Bucket::unbounded";
  if (!bucket.unbounded && ranks && spec.budget.kind == BudgetKind::top_p)
    return "it chooses by top_p; say so by Bucket::unbounded";
  if (!bucket.top_k && ranks && spec.budget.kind == BudgetKind::top_k)
    return "it chooses by top_k; say so by Bucket::top_k";
  const std::uint64_t window = std::uint64_t{spec.near.sink_tokens} + recent_of(spec);
  if (window > max_window && !bucket.unbounded)
    return "sinks and recent tokens are " + std::to_string(window) + ", and EngineOptions::max_window " +
           std::to_string(max_window);
  return {};
}

ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens) noexcept {
  ForwardRow row{.tokens = tokens, .dense_layers = spec.dense_layers, .dense_every = spec.dense_every};
  row.sink_end = spec.uses(Source::all) ? tokens : std::min(spec.near.sink_tokens, tokens);
  row.recent_begin = std::max(row.sink_end, tokens - std::min(recent_of(spec), tokens));
  const std::uint32_t between = row.recent_begin - row.sink_end;
  if (between == 0 || spec.sources == 0) return row;
  if (spec.budget.kind == BudgetKind::top_p) {
    row.mass = spec.budget.mass;
  } else {
    row.picks = std::min(budget_tokens(spec.budget, tokens), between);
  }
  return row;
}

}  // namespace sluice::scheduler
