// The pipeline of every policy that scores token by token: sources propose candidates, their scores are read or
// estimated once per KV head, each query head keeps what its budget allows, and what it kept feeds the history. Sources
// unite freely.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/policy/budget.hpp"
#include "scheduler/policy/history_upkeep.hpp"
#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/proposer.hpp"

namespace sluice::scheduler {
namespace {

/// What one selection needs and nothing after it.
struct SelectScratch {
  std::vector<TokenSet> sets;
  TokenSet anyway;  ///< what top-p weighs beside the candidates
  std::vector<float> behind;  ///< scores of the candidates by a row behind

  [[nodiscard]] std::span<TokenSet> candidates(std::uint32_t group) {
    if (sets.size() < group) sets.resize(group);
    return std::span(sets).first(group);
  }
};

SelectScratch& select_scratch() {
  thread_local SelectScratch scratch;
  return scratch;
}

class SparsePolicy final : public LayerPolicy {
 public:
  SparsePolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens, LayerId layer)
      : spec_(spec),
        budget_(spec, row_shape(shape, page_tokens)),
        proposer_(spec, shape.group(), page_tokens, budget_.first()),
        upkeep_(spec, shape.group(), layer),
        group_(shape.group()),
        heads_(shape.kv_heads) {
    const auto shared = spec.uses(Source::snapshot) ? std::make_shared<SharedBudget>(shape.kv_heads) : nullptr;
    for (SparseHead& head : heads_) {
      if (spec.uses(Source::history)) head.history.emplace(spec.history, group_, spec.near.sink_tokens);
      if (spec.uses(Source::clusters)) head.clusters.emplace(spec.clusters, shape);
      if (spec.uses(Source::lsh)) head.lsh.emplace(spec.lsh, shape, spec.near.sink_tokens);
      if (spec.uses(Source::snapshot)) head.snapshot.emplace(spec.snapshot, shape, layer, shared);
      if (spec.uses(Source::labels)) head.labels.emplace(spec.labels.channels, shape);
      if (spec.estimate == Estimate::hadamard) head.codes.emplace(shape);
      if (spec.bypass_threshold > 0.f) {
        head.bypass.emplace(spec.bypass_threshold, shape, spec.near.sink_tokens, spec.history.local_tokens,
                            spec.bypass_guards);
      }
    }
  }

  void begin(const PromptContext& prompt) override {
    SparseHead& head = heads_[prompt.kv_head];
    if (head.history) head.history->begin(prompt);
    if (head.clusters) head.clusters->begin(prompt);
    if (head.lsh) head.lsh->begin(prompt);
    if (head.snapshot) head.snapshot->begin(prompt);
    if (head.labels) head.labels->begin(prompt);
    if (head.codes) head.codes->begin(prompt);
    if (head.bypass) head.bypass->begin(prompt);
  }

  void forecast(std::uint32_t kv_head, std::uint32_t tokens) override {
    if (SparseHead& head = heads_[kv_head]; head.history) head.history->forecast(tokens);
  }

  bool propose(std::uint32_t kv_head, std::uint32_t tokens, ProposedTokens& to) override {
    SparseHead& head = heads_[kv_head];
    const Step step = begin_step(tokens, head);
    if (!step.seen || head.whole || !forecasts(spec_)) return false;
    head.observing = all_heads();
    const std::span<TokenSet> candidates = select_scratch().candidates(group_);
    SelectCounters counters;
    proposer_.propose({.kv_head = kv_head, .tokens = tokens}, head, candidates, counters);
    to.shared = proposer_.together(head);
    for (std::uint32_t h = 0; h < (to.shared ? 1 : group_); ++h)
      candidates[h].copy_to(to.words.subspan(h * to.head_words, to.head_words));
    return true;
  }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    SparseHead& head = heads_[context.kv_head];
    bypass.heads = 0;
    const auto [seen, dense, blank] = begin_step(context.tokens, head);
    if (!seen) return;
    if (head.bypass && !dense && !blank) (void)head.bypass->test(context, bypass, counters);
    head.observing = spec_.bypass_checked ? all_heads() : all_heads() & ~bypass.heads;
    if (dense) {
      select_dense(context, head, row, counters);
    } else if (head.observing != 0) {
      select_sparse(context, head, row, bypass, counters);
    }
    if (!wants_observation(context.kv_head)) head.scored.release();
  }

  [[nodiscard]] bool wants_observation(std::uint32_t kv_head) const noexcept override {
    const SparseHead& head = heads_[kv_head];
    return head.observes || (head.clusters && head.clusters->due(head.visible));
  }

  [[nodiscard]] std::uint64_t heap_bytes(std::uint32_t kv_head) const noexcept override {
    return heads_[kv_head].heap_bytes();
  }

  void observe(std::uint32_t kv_head, KvReader& kv) override {
    SparseHead& head = heads_[kv_head];
    if (head.clusters) head.clusters->cluster_new(head.visible, kv);
    if (head.history) upkeep_.learn(head);
    head.scored.release();
  }

  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<SparsePolicy>(*this); }

  [[nodiscard]] bool can_truncate(std::uint32_t kv_head, std::uint32_t tokens) const noexcept override {
    const SparseHead& head = heads_[kv_head];
    return !head.history || tokens >= head.visible || head.history->can_truncate(tokens);
  }

  void truncate(std::uint32_t kv_head, std::uint32_t tokens) noexcept override {
    SparseHead& head = heads_[kv_head];
    if (tokens >= head.visible) return;
    if (head.history) head.history->truncate(tokens);
    if (head.clusters) head.clusters->truncate(tokens);
    if (head.labels) head.labels->truncate(tokens);
    if (head.codes) head.codes->truncate(tokens);
    head.scored.release();
    head.observes = false;
    head.heavy.clear();  // What the history has noted of these steps it knows.
    head.visible = tokens;
    head.steps.truncate(tokens);
  }

 private:
  /// A step as far as it is known without its queries.
  struct Step {
    bool seen = false;  ///< there is something beyond the sinks
    bool dense = false;
    bool blank = false;
  };
  /// A step that has begun begins once more as it did.
  Step begin_step(std::uint32_t tokens, SparseHead& head) const {
    head.scored.clear();
    head.observing = 0;
    if (head.history) HistoryUpkeep::end_step(head, tokens);
    head.heavy.clear();
    head.visible = tokens;
    head.steps.add(tokens);
    const std::uint32_t sinks = spec_.near.sink_tokens;
    if (tokens <= sinks) return {};
    if (head.history) upkeep_.recall(tokens, head);

    // A budget that holds everything, or a history that tells nothing: attend all, and learn from it. If far tokens
    // have a budget that does not allow it, all are candidates.
    const bool blank = head.history && head.history->blank();
    const std::uint32_t candidates = tokens - sinks;
    const bool dense = (budget_.holds(candidates, tokens) && !evicts()) || (blank && budget_.fits(candidates, tokens));
    head.whole = dense || blank || spec_.uses(Source::exact);
    // A context attended for want of history is always learnt from.
    head.observes = head.history && (dense || blank || upkeep_.turn_came(head));
    return {.seen = true, .dense = dense, .blank = blank};
  }

  [[nodiscard]] std::uint32_t all_heads() const noexcept { return ~0u >> (32 - group_); }

  /// What was not kept of a prompt is not attended, however short that is.
  [[nodiscard]] bool evicts() const noexcept { return spec_.uses(Source::snapshot) && !spec_.uses(Source::exact); }

  void select_dense(const HeadContext& context, SparseHead& head, SelectionRow& row, SelectCounters& counters) {
    add_far_runs(*context.near, context.tokens, row);
    if (!head.history) {
      counters.candidates += row.attended();
      return;
    }
    const std::span<TokenSet> candidates = select_scratch().candidates(group_);
    proposer_.propose_all(context.tokens, candidates);
    collect(context, head, candidates, nullptr, counters);
    head.scored.score(*context.kv, context.q, group_);
    counters.scored += head.scored.size();
    head.scored.choose_all();
  }

  void select_sparse(const HeadContext& context, SparseHead& head, SelectionRow& row, Bypass& bypass,
                     SelectCounters& counters) {
    SelectScratch& scratch = select_scratch();
    const std::span<TokenSet> candidates = scratch.candidates(group_);
    if (head.whole) {
      proposer_.propose_all(context.tokens, candidates);
    } else {
      proposer_.propose(context, head, candidates, counters);
    }
    if (budget_.weighs()) {
      const AttendedAnyway anyway = budget_.attended_anyway(context);
      scratch.anyway.reset(context.tokens);
      scratch.anyway.add_range(0, anyway.sink_end);
      scratch.anyway.add_range(anyway.recent_begin, context.tokens);
    }
    collect(context, head, candidates, budget_.weighs() ? &scratch.anyway : nullptr, counters);
    if (head.codes) {
      estimate_by(*head.codes, context, head.scored, counters);
    } else {
      budget_.score(context, group_, head.scored, counters);
    }
    if (spec_.bypass_checked && bypass.heads != 0) confirm_bypass(context, head, bypass, counters);
    budget_.choose(context, group_, head.scored);
    if (head.history && !budget_.estimates()) upkeep_.find_heavy(head);
    const bool united = proposer_.shares() || budget_.unites();
    head.scored.emit(group_, united ? Membership::united : Membership::own, row);
  }

  /// Of the heads that would be bypassed those whose candidates weigh little, to the rows behind as well, are, and take
  /// no further part.
  void confirm_bypass(const HeadContext& context, SparseHead& head, Bypass& bypass, SelectCounters& counters) const {
    const std::span<const std::uint32_t> tokens = head.scored.tokens();
    const auto sinks =
        static_cast<std::size_t>(std::ranges::lower_bound(tokens, spec_.near.sink_tokens) - tokens.begin());
    const auto confirm = [&](std::uint32_t row, std::span<const float> scores) {
      head.bypass->confirm(row, scores.subspan(sinks * group_), bypass);
    };
    confirm(0, head.scored.scores());
    const auto behind = static_cast<std::uint32_t>(bypass.lse.size() / group_ - 1);
    const std::size_t floats = context.behind.size() / std::max(behind, 1u);
    for (std::uint32_t row = 0; row < behind && bypass.heads != 0; ++row) {
      const float* const q = context.behind.data() + row * floats;
      confirm(row + 1, head.scored.scores_by(q, *context.kv, group_, select_scratch().behind));
      (budget_.estimates() ? counters.estimated : counters.scored) += head.scored.size();
    }
    head.observing &= ~bypass.heads;
    head.scored.drop(bypass.heads);
  }

  /// By what the policy keeps of every key.
  void estimate_by(HadamardCodes& codes, const HeadContext& context, ScoredSet& scored,
                   SelectCounters& counters) const {
    codes.follow(context.tokens, *context.kv);
    scored.estimate(codes, *context.kv, context.q, group_);
    counters.estimated += scored.size();
    counters.index_bytes += scored.size() * codes.bytes_per_token();
  }

  void collect(const HeadContext& context, SparseHead& head, std::span<const TokenSet> candidates,
               const TokenSet* weighed, SelectCounters& counters) const {
    head.scored.collect({.sets = candidates,
                         .active = head.observing,
                         .shared = proposer_.together(head) && !head.whole,
                         .keep_near = budget_.weighs() || (head.observes && spec_.history.observe_near),
                         .weighed = weighed},
                        *context.near);
    for (std::uint32_t h = 0; h < group_; ++h) {
      if (((head.observing >> h) & 1) == 0) continue;
      const bool own = !proposer_.together(head) || head.whole;
      counters.expanded_per_head += own             ? candidates[h].size()
                                    : head.followed ? candidates.front().size()
                                                    : head.history->expanded(h).size();
    }
    counters.candidates += head.scored.united();
    counters.near_hits += head.scored.near_hits();
  }

  PolicySpec spec_;
  Budget budget_;
  Proposer proposer_;
  HistoryUpkeep upkeep_;
  std::uint32_t group_;
  std::vector<SparseHead> heads_;  ///< [kv_heads]
};

}  // namespace

std::uint64_t sparse_state_bytes(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t tokens) noexcept {
  // Lists of a few tokens and numbers.
  constexpr std::uint64_t kHeavyTokens = 64;
  tokens += kUndoTokens;  // That were taken back, and whose memory is kept.
  const bool heavy = spec.uses(Source::history) && spec.history.observe_every != 1;
  std::uint64_t bytes = shape.group() * (heavy ? 1 + kHeavyTokens : 0) * sizeof(float);
  if (spec.uses(Source::history)) bytes += GroupHistory::most_heap_bytes(spec.history, shape.group(), tokens);
  if (spec.uses(Source::clusters)) bytes += ClusterSource::most_heap_bytes(spec.clusters, shape, tokens);
  if (spec.uses(Source::lsh)) bytes += LshSource::most_heap_bytes(spec.lsh, shape, tokens);
  if (spec.uses(Source::snapshot)) bytes += SnapshotSource::most_heap_bytes(spec.snapshot, shape, tokens);
  if (spec.uses(Source::labels)) bytes += LabelCache::most_heap_bytes(spec.labels.channels, shape, tokens);
  if (spec.estimate == Estimate::hadamard) bytes += HadamardCodes::most_heap_bytes(shape, tokens);
  if (spec.bypass_threshold > 0.f) bytes += SinkBypass::most_heap_bytes(shape);
  return bytes;
}

std::unique_ptr<LayerPolicy> make_sparse_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                std::uint32_t page_tokens, LayerId layer) {
  return std::make_unique<SparsePolicy>(spec, shape, page_tokens, layer);
}

}  // namespace sluice::scheduler
