#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {
namespace {

/// The new token itself is always attended.
std::uint32_t recent_of(const PolicySpec& spec) noexcept { return std::max(spec.near.recent_tokens, 1u); }

}  // namespace

std::string forward_unserved(const PolicySpec& spec, std::uint32_t max_window) {
  if (spec.sources != static_cast<std::uint8_t>(Source::exact) || spec.estimate != Estimate::int4 ||
      spec.budget.kind != BudgetKind::top_k)
    return "it is not of the form `exact | int4 | top_k=COUNT`";
  if (spec.near.share != 0.f) return "it attends a share of pages near; say near=0";
  if (spec.bypass_threshold != 0.f) return "it bypasses heads; say bypass=off";
  if (spec.dense_layers != 0 || spec.dense_every != 0) return "it has dense layers";
  const std::uint64_t window = std::uint64_t{spec.near.sink_tokens} + recent_of(spec);
  if (window > max_window)
    return "sinks and recent tokens are " + std::to_string(window) + ", and EngineOptions::max_window " +
           std::to_string(max_window);
  return {};
}

ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens) noexcept {
  ForwardRow row{.tokens = tokens};
  row.sink_end = std::min(spec.near.sink_tokens, tokens);
  row.recent_begin = std::max(row.sink_end, tokens - std::min(recent_of(spec), tokens));
  row.picks = std::min(budget_tokens(spec.budget, tokens), row.recent_begin - row.sink_end);
  return row;
}

}  // namespace sluice::scheduler
