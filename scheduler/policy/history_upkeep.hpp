#pragma once

#include <cstdint>

#include "scheduler/policy/proposer.hpp"
#include "sluice/policy.hpp"
#include "sluice/units.hpp"

namespace sluice::scheduler {

/// Keeps the history of a sparse policy's KV heads up to date: when it learns, from what, and what is remembered of
/// steps that it does not learn from. For heads that have one.
class HistoryUpkeep {
 public:
  HistoryUpkeep(const PolicySpec& spec, std::uint32_t group, LayerId layer)
      : spec_(spec), group_(group), layer_(layer.value) {}

  /// Before a step with as many tokens: if it is not the last one once more, that one is over.
  static void end_step(SparseHead& head, std::uint32_t tokens);
  /// The candidates of a step: forecast in the background or, if nothing was observed since, carried on.
  void recall(std::uint32_t tokens, SparseHead& head) const;
  /// Whether the newest step is to be learnt from. Every so many tokens, counting tokens, so that a repeated step gets
  /// its turn again, and steps that took several do not miss it.
  [[nodiscard]] bool turn_came(const SparseHead& head) const noexcept;
  /// What a step that is not learnt from has attended most.
  void find_heavy(SparseHead& head) const;
  /// From the last selection, if that is observed.
  void learn(SparseHead& head) const;

 private:
  /// Between two observations only what is heavy is remembered: a token that holds this share of what its head
  /// attended. At most as many per head as the share's inverse.
  static constexpr float kHeavy = 1.f / 32.f;

  PolicySpec spec_;
  std::uint32_t group_;
  std::uint32_t layer_;
};

}  // namespace sluice::scheduler
