#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/clusters/cluster_source.hpp"
#include "scheduler/heap_bytes.hpp"
#include "scheduler/history/group_history.hpp"
#include "scheduler/labels/hadamard_codes.hpp"
#include "scheduler/labels/label_cache.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/lsh/lsh_source.hpp"
#include "scheduler/policy/bypass.hpp"
#include "scheduler/policy/recent_steps.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "scheduler/snapshot/snapshot_source.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// One KV head of a sparse policy. `scored` lives from `select` to `observe`.
struct SparseHead {
  std::optional<GroupHistory> history;
  std::optional<ClusterSource> clusters;
  std::optional<LshSource> lsh;
  std::optional<SnapshotSource> snapshot;
  std::optional<LabelCache> labels;
  std::optional<HadamardCodes> codes;
  std::optional<SinkBypass> bypass;
  ScoredSet scored;
  std::uint32_t visible = 0;    ///< tokens in the last selection
  RecentSteps steps;            ///< likewise, of the last ones that were not taken back
  bool observes = false;        ///< the last selection feeds the tables
  bool followed = false;        ///< the last selection's candidates were not forecast but carried on
  std::vector<float> lse;       ///< [group] scratch
  std::vector<std::uint32_t> heavy;  ///< tokens that the last selection found heavy, not remembered yet
  std::uint32_t observing = 0;  ///< bit h: query head h was not bypassed
  bool whole = false;           ///< every token is a candidate of every head

  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return (history ? history->heap_bytes() : 0) + (clusters ? clusters->heap_bytes() : 0) +
           (lsh ? lsh->heap_bytes() : 0) + (snapshot ? snapshot->heap_bytes() : 0) +
           (labels ? labels->heap_bytes() : 0) + (codes ? codes->heap_bytes() : 0) +
           (bypass ? bypass->heap_bytes() : 0) + scored.heap_bytes() + scheduler::heap_bytes(lse, heavy);
  }
};

/// What the sources of a policy propose, united freely.
class Proposer {
 public:
  /// @param first  see Budget::first
  Proposer(const PolicySpec& spec, std::uint32_t group, std::uint32_t page_tokens, std::uint32_t first)
      : spec_(spec), group_(group), page_tokens_(page_tokens), first_(first) {}

  /// Every token, for every query head. `candidates` [group], here and below.
  void propose_all(std::uint32_t tokens, std::span<TokenSet> candidates) const;
  /// What history expanded to, the newest tokens, the pages that rank highest, similar keys, the best by labels; one
  /// set per query head, or the first for all of them.
  void propose(const HeadContext& context, SparseHead& head, std::span<TokenSet> candidates,
               SelectCounters& counters) const;

  /// Whether one set of candidates serves the group in this step.
  [[nodiscard]] bool together(const SparseHead& head) const noexcept { return shares() || head.followed; }
  [[nodiscard]] bool shares() const noexcept { return spec_.uses(Source::history) && spec_.history.share_in_group; }

 private:
  void add_like_keys(const HeadContext& context, std::uint32_t h, SparseHead& head, TokenSet& set) const;
  void add_best_labelled(const HeadContext& context, SparseHead& head, std::span<TokenSet> candidates,
                         SelectCounters& counters) const;
  void add_local(const HeadContext& context, TokenSet& set) const;
  void add_pages(const HeadContext& context, std::uint32_t begin, std::uint32_t end, TokenSet& set) const;

  PolicySpec spec_;
  std::uint32_t group_;
  std::uint32_t page_tokens_;
  std::uint32_t first_;
};

}  // namespace sluice::scheduler
