#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {
namespace {

bool only(const PolicySpec& spec, Source source) noexcept { return spec.sources == static_cast<std::uint8_t>(source); }

/// Whether what is attended is chosen by score.
bool ranks(const PolicySpec& spec) noexcept { return spec.sources != 0 && !spec.uses(Source::all); }

bool by_copies(const PolicySpec& spec) noexcept {
  const bool cut = spec.budget.kind == BudgetKind::top_k || spec.budget.kind == BudgetKind::top_p;
  return only(spec, Source::exact) && spec.estimate == Estimate::int4 && cut;
}

/// The new token itself is always attended, but by policies of the CPU, which see to it.
std::uint32_t recent_of(const PolicySpec& spec) noexcept {
  return std::max(spec.near.recent_tokens, chooser(spec) == Chooser::cpu ? 0u : 1u);
}

std::string why_neither(const PolicySpec& spec) {
  if (spec.uses(Source::pages)) return "it ranks pages";
  if (by_copies(spec) && spec.bypass_threshold != 0.f) return "it bypasses heads; say bypass=off";
  if (spec.estimate == Estimate::int4) return "it estimates by 4-bit keys beside other sources than `exact`";
  return "it attends a share of pages near; say near=0";
}

}  // namespace

Chooser chooser(const PolicySpec& spec) noexcept {
  if (!ranks(spec)) return spec.near.share != 0.f && !spec.uses(Source::all) ? Chooser::neither : Chooser::device;
  if (spec.near.share != 0.f) return Chooser::neither;
  if (by_copies(spec) && spec.bypass_threshold == 0.f) return Chooser::device;
  return spec.uses(Source::pages) || spec.estimate == Estimate::int4 ? Chooser::neither : Chooser::cpu;
}

std::uint32_t prompt_queries(const PolicySpec& spec) noexcept {
  if (spec.uses(Source::history)) return spec.history.init_queries;
  return spec.bypass_threshold > 0.f ? 1 : 0;
}

bool remembers(const PolicySpec& spec) noexcept {
  return spec.uses(Source::history) || spec.uses(Source::clusters) || spec.uses(Source::lsh) ||
         spec.bypass_threshold > 0.f;
}

std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, std::uint32_t max_window) {
  const Chooser who = chooser(spec);
  if (who == Chooser::neither) return why_neither(spec);
  const bool by_device = who == Chooser::device && ranks(spec);
  const bool whole = spec.uses(Source::all) || spec.dense_layers != 0 || spec.dense_every != 0;
  if (!bucket.unbounded && whole) return "it attends everything in some layer; say so by Bucket::unbounded";
  if (!bucket.unbounded && by_device && spec.budget.kind == BudgetKind::top_p)
    return "it chooses by top_p; say so by Bucket::unbounded";
  if (!bucket.top_k && by_device && spec.budget.kind == BudgetKind::top_k)
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
  if (chooser(spec) == Chooser::cpu) {
    row.asks = 1;
    return row;
  }
  if (between == 0 || spec.sources == 0) return row;
  if (spec.budget.kind == BudgetKind::top_p) {
    row.mass = spec.budget.mass;
  } else {
    row.picks = std::min(budget_tokens(spec.budget, tokens), between);
  }
  return row;
}

}  // namespace sluice::scheduler
