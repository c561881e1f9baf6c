// The pipeline of every policy that scores token by token: sources propose candidates, their scores are read or estimated
// once per KV head, each query head keeps what its budget allows, and what it kept feeds the history. Sources unite
// freely.

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "scheduler/clusters/cluster_source.hpp"
#include "scheduler/history/group_history.hpp"
#include "scheduler/lsh/lsh_source.hpp"
#include "scheduler/policy/budget.hpp"
#include "scheduler/policy/bypass.hpp"
#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"

namespace sluice::scheduler {
namespace {

/// One KV head. `scored` lives from `select` to `observe`.
struct Head {
  std::optional<GroupHistory> history;
  std::optional<ClusterSource> clusters;
  std::optional<LshSource> lsh;
  std::optional<SinkBypass> bypass;
  std::vector<TokenSet> candidates;  ///< [group]
  ScoredSet scored;
  std::uint32_t visible = 0;    ///< tokens in the last selection
  std::vector<float> q;         ///< [group, head_dim] of the selection whose scores were deferred
  bool observes = false;        ///< the last selection feeds the tables
  bool followed = false;        ///< the last selection's candidates were not forecast but carried on
  std::vector<float> lse;       ///< [group] scratch
  std::uint32_t observing = 0;  ///< bit h: query head h was not bypassed
  bool whole = false;           ///< every token was scored: scratch is n-sized, not worth keeping
};

class SparsePolicy final : public LayerPolicy {
 public:
  SparsePolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens, LayerId layer)
      : spec_(spec),
        budget_(spec, page_tokens),
        group_(shape.group()),
        head_dim_(shape.head_dim),
        layer_(layer.value),
        page_tokens_(page_tokens),
        heads_(shape.kv_heads) {
    for (Head& head : heads_) {
      if (spec.uses(Source::history)) head.history.emplace(spec.history, group_, spec.near.sink_tokens);
      if (spec.uses(Source::clusters)) head.clusters.emplace(spec.clusters, shape);
      if (spec.uses(Source::lsh)) head.lsh.emplace(spec.lsh, shape, spec.near.sink_tokens);
      if (spec.bypass_threshold > 0.f) {
        head.bypass.emplace(spec.bypass_threshold, shape, spec.near.sink_tokens, spec.history.local_tokens);
      }
      head.candidates.resize(group_);
    }
  }

  void begin(const PromptContext& prompt) override {
    Head& head = heads_[prompt.kv_head];
    if (head.history) head.history->begin(prompt);
    if (head.clusters) head.clusters->begin(prompt);
    if (head.lsh) head.lsh->begin(prompt);
    if (head.bypass) head.bypass->begin(prompt);
  }

  void forecast(std::uint32_t kv_head, std::uint32_t tokens, std::uint32_t limit, std::vector<HotPage>& hot) override {
    Head& head = heads_[kv_head];
    if (!head.history) return;
    head.history->forecast(tokens);
    head.history->hot_pages(page_tokens_, limit, hot);
  }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    Head& head = heads_[context.kv_head];
    bypass.heads = 0;
    head.scored.clear();
    head.observing = 0;
    head.visible = context.tokens;
    const std::uint32_t sinks = spec_.near.sink_tokens;
    if (context.tokens <= sinks) return;
    if (head.history) recall(context.tokens, head);

    // A budget that holds everything, or a history that tells nothing: attend all, and learn from it.
    const bool dense = budget_.holds(context.tokens - sinks) || (head.history && head.history->blank());
    head.whole = dense || spec_.uses(Source::exact);
    // A context attended for want of history is always learnt from. Counting tokens, a repeated step gets its turn again.
    head.observes = head.history && (dense || (context.tokens + layer_) % spec_.history.observe_every == 0);
    std::uint32_t active = all_heads();
    if (head.bypass && !dense) active &= ~head.bypass->test(context, bypass, counters);
    head.observing = active;
    if (dense) {
      select_dense(context, head, row, counters);
    } else if (active != 0 && !context.kept.empty()) {
      select_kept(context, head, row, counters);
    } else if (active != 0) {
      select_sparse(context, head, row, counters);
    }
    if (head.whole && !head.history) forget(head);
  }

  [[nodiscard]] bool wants_observation() const noexcept override {
    return std::any_of(heads_.begin(), heads_.end(), [](const Head& head) {
      return head.observes || (head.clusters && head.clusters->due(head.visible));
    });
  }

  void note(std::uint32_t kv_head, std::span<const std::uint32_t> tokens, std::span<const float> scores,
            std::span<const float> lse) override {
    Head& head = heads_[kv_head];
    if (notes(head)) note_heavy(head, tokens, scores, lse);
  }

  void observe(std::uint32_t kv_head, KvReader& kv) override {
    Head& head = heads_[kv_head];
    if (head.clusters) head.clusters->cluster_new(head.visible, kv);
    if (!head.history) return;
    if (!head.observes) return;
    if (!head.scored.scored()) head.scored.score(kv, head.q.data(), group_);
    for (std::uint32_t h = 0; h < group_; ++h) {
      if (((head.observing >> h) & 1) == 0) continue;
      const ScoredSet::Observed seen = head.scored.observed(h, group_);
      head.history->observe(h, seen.tokens, seen.scores);
    }
    head.observing = 0;
    if (head.whole) forget(head);
  }

 private:
  [[nodiscard]] std::uint32_t all_heads() const noexcept { return ~0u >> (32 - group_); }

  /// The candidates for this step: forecast in the background or, if nothing was observed since, carried on.
  void recall(std::uint32_t tokens, Head& head) const {
    head.followed = spec_.history.observe_every != 1 && head.history->can_follow(tokens);
    if (head.followed) {
      head.history->follow(tokens);
    } else {
      head.history->forecast(tokens);
    }
  }

  /// Between two observations only what is heavy is remembered: a token that holds this share of what its head
  /// attended. At most as many per head as the share's inverse.
  static constexpr float kHeavy = 1.f / 32.f;

  [[nodiscard]] bool notes(const Head& head) const noexcept {
    return head.history && spec_.history.observe_every != 1 && !head.observes;
  }

  void note_heavy(Head& head, std::span<const std::uint32_t> tokens, std::span<const float> scores,
                  std::span<const float> lse) const {
    const float log_share = std::log(kHeavy);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      bool heavy = false;
      for (std::uint32_t h = 0; h < group_; ++h) heavy |= scores[i * group_ + h] > lse[h] + log_share;
      if (heavy) head.history->note(tokens[i]);
    }
  }

  void select_dense(const HeadContext& context, Head& head, SelectionRow& row, SelectCounters& counters) {
    add_far_runs(*context.near, context.tokens, row);
    if (!head.history) {
      counters.candidates += row.attended();
      return;
    }
    fill_all(context.tokens, head);
    collect(context, head, counters);
    head.scored.score(*context.kv, context.q, group_);
    counters.scored += head.scored.size();
    head.scored.choose_all();
  }

  void select_sparse(const HeadContext& context, Head& head, SelectionRow& row, SelectCounters& counters) {
    if (spec_.uses(Source::exact)) {
      fill_all(context.tokens, head);
    } else {
      propose(context, head);
    }
    const std::uint32_t most = budget_.tokens(context.tokens);
    if (most != 0 && context.defer_scores && head.followed && !head.observes && head.observing == all_heads() && !head.whole) {
      // Nothing is learnt in this step, so that no score and no near token matters.
      head.scored.emit_far(head.candidates.front(), *context.near, row);
      if (row.tokens.size() <= most) {
        counters.expanded_per_head += head.candidates.front().size();
        count(head, counters);
        return;
      }
      row.clear();
    }
    collect(context, head, counters);
    if (context.defer_scores && head.history && head.scored.size() <= most) {
      if (head.observes) {
        head.q.assign(context.q, context.q + std::size_t{group_} * head_dim_);
        counters.scored += head.scored.size();  // In `observe`.
      }
      head.scored.choose_all();
    } else {
      budget_.cut(context, group_, head.scored, counters);
      if (notes(head) && !budget_.estimates()) {
        note_heavy(head, head.scored.tokens(), head.scored.scores(), head.scored.log_sums(group_, head.lse));
      }
    }
    const bool united = shares() || budget_.unites();
    head.scored.emit(group_, united ? Membership::united : Membership::own, row);
  }

  /// A device has estimated and cut already.
  void select_kept(const HeadContext& context, Head& head, SelectionRow& row, SelectCounters& counters) const {
    TokenSet& set = head.candidates.front();
    set.reset(context.tokens);
    counters.expanded_per_head += budget_.unite_kept(context, group_, head.observing, set);
    head.scored.emit_far(set, *context.near, row);
    if (head.observing != all_heads()) row.members.assign(row.tokens.size(), head.observing);
    count(head, counters);
  }

  void fill_all(std::uint32_t tokens, Head& head) const {
    for (TokenSet& set : head.candidates) {
      set.reset(tokens);
      set.add_range(budget_.first(), tokens);
    }
  }

  /// Candidates: what history expanded to, the newest tokens, the pages that rank highest; one set per query head, or
  /// the first for all of them.
  void propose(const HeadContext& context, Head& head) const {
    if (head.clusters) head.clusters->rank(context.q, *context.kv);
    if (head.lsh) head.lsh->hash(context.q, *context.kv);
    if (together(head)) {
      TokenSet& set = head.candidates.front();
      set.reset(context.tokens);
      if (head.followed) {
        head.history->unite_followed(set);
      } else {
        set.unite(head.history->united());
      }
      add_local(context, set);
      add_pages(context, 0, group_, set);
      for (std::uint32_t h = 0; h < group_; ++h) add_like_keys(context, h, head, set);
      return;
    }
    for (std::uint32_t h = 0; h < group_; ++h) {
      if (((head.observing >> h) & 1) == 0) continue;
      TokenSet& set = head.candidates[h];
      set.reset(context.tokens);
      if (head.history) {
        set.unite(head.history->expanded(h));
        add_local(context, set);
      }
      add_pages(context, h, h + 1, set);
      add_like_keys(context, h, head, set);
    }
  }

  /// What lies in clusters, or meets in hash tables, with the query of head `h`; and what is in neither of them.
  void add_like_keys(const HeadContext& context, std::uint32_t h, Head& head, TokenSet& set) const {
    if (head.clusters) head.clusters->propose(h, spec_.near.sink_tokens, context.tokens, set);
    if (!head.lsh) return;
    head.lsh->add_collisions(h, set);
    set.add_range(std::max(head.lsh->end(), spec_.near.sink_tokens), context.tokens);
  }

  /// The newest token and the local ones before it: their vertical entries are too young to speak.
  void add_local(const HeadContext& context, TokenSet& set) const {
    const std::uint32_t local = std::min(spec_.history.local_tokens + 1, context.tokens - spec_.near.sink_tokens);
    set.add_range(context.tokens - local, context.tokens);
  }

  /// The ranked pages of query heads [begin, end).
  void add_pages(const HeadContext& context, std::uint32_t begin, std::uint32_t end, TokenSet& set) const {
    const std::size_t ranked = context.ranked_pages.size() / group_;
    for (const std::uint32_t page : context.ranked_pages.subspan(begin * ranked, (end - begin) * ranked)) {
      set.add_range(std::max(page * page_tokens_, budget_.first()),
                    std::min((page + 1) * page_tokens_, context.tokens));
    }
    // No digest speaks for the newest page; beside history its tokens are the local ones.
    if (!spec_.uses(Source::history)) set.add_range(newest_page(context.tokens, page_tokens_), context.tokens);
  }

  void collect(const HeadContext& context, Head& head, SelectCounters& counters) const {
    head.scored.collect({.sets = head.candidates,
                         .active = head.observing,
                         .shared = together(head) && !head.whole,
                         .keep_near = budget_.weighs() || (head.observes && spec_.history.observe_near)},
                        *context.near);
    for (std::uint32_t h = 0; h < group_; ++h) {
      if (((head.observing >> h) & 1) == 0) continue;
      const bool own = !together(head) || head.whole;
      counters.expanded_per_head += own             ? head.candidates[h].size()
                                    : head.followed ? head.candidates.front().size()
                                                    : head.history->expanded(h).size();
    }
    count(head, counters);
  }

  static void count(const Head& head, SelectCounters& counters) noexcept {
    counters.candidates += head.scored.united();
    counters.near_hits += head.scored.near_hits();
  }

  /// Whether one set of candidates serves the group in this step.
  [[nodiscard]] bool together(const Head& head) const noexcept { return shares() || head.followed; }
  [[nodiscard]] bool shares() const noexcept { return spec_.uses(Source::history) && spec_.history.share_in_group; }

  /// Frees what one whole-context selection needed.
  static void forget(Head& head) {
    head.scored = ScoredSet();
    for (TokenSet& set : head.candidates) set = TokenSet();
  }

  PolicySpec spec_;
  Budget budget_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  std::uint32_t layer_;
  std::uint32_t page_tokens_;
  std::vector<Head> heads_;  ///< [kv_heads]
};

}  // namespace

std::unique_ptr<LayerPolicy> make_sparse_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                std::uint32_t page_tokens, LayerId layer) {
  return std::make_unique<SparsePolicy>(spec, shape, page_tokens, layer);
}

}  // namespace sluice::scheduler
