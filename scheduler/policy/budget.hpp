#pragma once

#include <cstdint>

#include "scheduler/layer_policy.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// First token of the page that holds the newest of `tokens` tokens: it has neither digest nor 4-bit copy yet.
[[nodiscard]] constexpr std::uint32_t newest_page(std::uint32_t tokens, std::uint32_t page_tokens) noexcept {
  return (tokens - 1) / page_tokens * page_tokens;
}

/// The stages of a policy between its sources and its selection: how candidates are scored, and how many each query
/// head keeps.
///
/// Top-p is that of sluice/top_p.hpp.
class Budget {
 public:
  Budget(const PolicySpec& spec, const RowShape& shape) : spec_(spec), shape_(shape) {}

  [[nodiscard]] bool estimates() const noexcept { return spec_.estimate == Estimate::int4; }
  [[nodiscard]] bool weighs() const noexcept { return spec_.budget.kind == BudgetKind::top_p; }
  /// What a head keeps, its whole group attends (arXiv 2502.02770, appendix B.2).
  [[nodiscard]] bool unites() const noexcept { return estimates() || weighs(); }
  /// The first position that sources may propose. History has no place for sinks; top-p weighs them all the same.
  [[nodiscard]] std::uint32_t first() const noexcept {
    return weighs() && !spec_.uses(Source::history) ? 0 : spec_.near.sink_tokens;
  }
  /// Whether `candidates` of `visible` tokens are kept without looking at them.
  [[nodiscard]] bool holds(std::uint32_t candidates, std::uint32_t visible) const noexcept {
    return !weighs() && candidates <= spec_.budget.min_tokens && fits(candidates, visible);
  }
  /// Whether as many may be attended far.
  [[nodiscard]] bool fits(std::uint32_t candidates, std::uint32_t visible) const noexcept {
    return candidates <= far_tokens_per_head(spec_.far, visible, shape_);
  }
  /// How many each query head keeps at least, if it has them; 0 if that depends on their scores.
  [[nodiscard]] std::uint32_t tokens(std::uint32_t visible) const noexcept {
    return weighs() ? 0 : tokens_per_head(spec_, visible, shape_);
  }

  /// What top-p counts first.
  [[nodiscard]] AttendedAnyway attended_anyway(const HeadContext& context) const noexcept;

  /// Scores the candidates, or estimates them by 4-bit copies.
  void score(const HeadContext& context, std::uint32_t group, ScoredSet& scored, SelectCounters& counters) const;
  /// Lets every query head keep its share of them.
  void choose(const HeadContext& context, std::uint32_t group, ScoredSet& scored) const;

 private:
  PolicySpec spec_;
  RowShape shape_;
};

}  // namespace sluice::scheduler
