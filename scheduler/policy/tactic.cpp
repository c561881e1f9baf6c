// Tactic (Zhu et al., arXiv 2502.12216), with the paper's parameters. Where its parts are:
//   section 4.2        the stage `cluster`     k-means over the keys of each KV head
//   section 4.3        clusters/cluster_source.cpp      clusters by q.centroid, per query head
//   section 4.4, B     clusters/curve_fit.cpp           how many tokens hold the share P
//   section 4.5        here                             the union over the group's query heads
// Tokens that are in no cluster yet are all attended. They count towards P, and so do sinks and the recent window: P is
// the share of all that is attended, and where those hold it no cluster is read. The paper does not say; not to count
// them would be safe, but keeps more than P asks for.
//
// With `int4` (tactic | int4) samples are estimated by 4-bit copies, and the device does all of it: the same k-means,
// by gpu/kernels/cluster, and the verb `choose_clusters` instead of what is here, which then only tests compare it
// with.
//
// A budget of far tokens is first of those in no cluster, then of clusters. Where it cannot hold the former, each query
// head attends the best of them by their scores, and no cluster.

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <vector>

#include "scheduler/clusters/cluster_source.hpp"
#include "scheduler/clusters/curve_fit.hpp"
#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"

namespace sluice::scheduler {

PolicySpec tactic_spec() {
  PolicySpec spec;
  spec.name = "tactic";
  spec.sources = static_cast<std::uint16_t>(Source::clusters);
  spec.budget.kind = BudgetKind::fitted;
  spec.budget.mass = 0.9f;
  spec.near = {.sink_tokens = 0, .recent_tokens = 0, .share = 0.f};
  return spec;
}

namespace {

/// Tokens that several heads have sampled, each once, and their scores.
class SampledTokens {
 public:
  void reset(std::uint32_t tokens) { set_.reset(tokens); }
  void add(std::uint32_t token) noexcept { set_.add(token); }
  /// Reads every K row once, or its 4-bit copy.
  void score(std::uint32_t tokens, const float* q, std::uint32_t group, Estimate estimate, KvReader& kv) {
    before_.resize((std::size_t{tokens} + 63) / 64);
    list_.clear();
    for (std::size_t word = 0; word < before_.size(); ++word) {
      before_[word] = static_cast<std::uint32_t>(list_.size());
      for (std::uint64_t bits = set_.word(word); bits != 0; bits &= bits - 1) {
        list_.push_back(static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(std::countr_zero(bits)));
      }
    }
    scores_.resize(list_.size() * group);
    if (!list_.empty() && estimate == Estimate::int4) kv.estimate(q, list_, scores_.data());
    if (!list_.empty() && estimate != Estimate::int4) kv.score(q, list_, scores_.data());
    group_ = group;
  }
  /// Of a token that was added.
  [[nodiscard]] float of(std::uint32_t token, std::uint32_t h) const noexcept {
    const std::uint64_t below = set_.word(token / 64) & ((std::uint64_t{1} << (token % 64)) - 1);
    return scores_[(before_[token / 64] + static_cast<std::size_t>(std::popcount(below))) * group_ + h];
  }
  [[nodiscard]] std::size_t size() const noexcept { return list_.size(); }

 private:
  TokenSet set_;
  std::vector<std::uint32_t> list_;    ///< ascending
  std::vector<std::uint32_t> before_;  ///< members before each word
  std::vector<float> scores_;          ///< [list, group]
  std::uint32_t group_ = 1;
};

class FittedPolicy final : public LayerPolicy {
 public:
  FittedPolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens)
      : spec_(spec),
        shape_(row_shape(shape, page_tokens)),
        group_(shape.group()),
        heads_(shape.kv_heads, Head(spec.clusters, shape)) {}

  void begin(const PromptContext& prompt) override { heads_[prompt.kv_head].source.begin(prompt); }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    Head& head = heads_[context.kv_head];
    bypass.heads = 0;
    head.visible = context.tokens;
    const FitSamples samples = fit_samples(spec_.clusters, head.source.clustered());
    const std::uint32_t most = far_tokens_per_head(spec_.far, context.tokens, shape_);
    const std::uint32_t apart = spec_.far.all() ? 0 : in_no_cluster(context, samples.tokens);
    if (apart > most) return select_best(context, samples.tokens, most, row, counters);
    if (samples.tokens == 0) {
      add_far_runs(*context.near, context.tokens, row);
      counters.candidates += row.attended();
      counters.expanded_per_head += row.attended() * group_;
      return;
    }
    head.source.rank(context.q, *context.kv);
    counters.index_bytes += head.source.ranking_bytes();
    const std::uint32_t recent_begin = std::min(context.near->recent_begin, samples.tokens);
    const Anyway anyway{.sink_end = std::min(context.near->sink_end, recent_begin),
                        .recent_begin = recent_begin,
                        .tokens = context.tokens};
    thread_local Scratch scratch;
    sample(context, samples, anyway, head, scratch);
    scratch.chosen.reset(samples.tokens);
    for (std::uint32_t h = 0; h < group_; ++h)
      counters.expanded_per_head += choose(h, samples, anyway, most - apart, head, scratch);
    scratch.united.emit_far(scratch.chosen, *context.near, row);
    add_far_runs(*context.near, samples.tokens, context.tokens, row);

    const std::uint32_t recent = context.tokens - samples.tokens;
    counters.expanded_per_head += std::uint64_t{recent} * group_;
    counters.candidates += scratch.united.united() + recent;
    counters.near_hits += scratch.united.near_hits();
    (spec_.estimate == Estimate::int4 ? counters.estimated : counters.scored) += scratch.sampled.size();
  }

  /// Clustering takes a step's time, so it is left to the background. Whether it is due depends on the context's length
  /// alone, and the engine waits for it before the layer's next step: new clusters serve from the same step in every
  /// run.
  [[nodiscard]] bool wants_observation(std::uint32_t kv_head) const noexcept override {
    return heads_[kv_head].source.due(heads_[kv_head].visible);
  }
  void observe(std::uint32_t kv_head, KvReader& kv) override {
    heads_[kv_head].source.cluster_new(heads_[kv_head].visible, kv);
  }
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<FittedPolicy>(*this); }
  void truncate(std::uint32_t kv_head, std::uint32_t tokens) noexcept override {
    Head& head = heads_[kv_head];
    if (tokens >= head.visible) return;
    head.source.truncate(tokens);
    head.visible = tokens;
  }
  [[nodiscard]] std::uint64_t heap_bytes(std::uint32_t kv_head) const noexcept override {
    return heads_[kv_head].source.heap_bytes();
  }

 private:
  struct Head {
    Head(const ClusterOptions& options, const AttentionShape& shape) : source(options, shape) {}
    ClusterSource source;
    std::uint32_t visible = 0;  ///< tokens in the last selection
  };

  /// Of one selection.
  struct Scratch {
    SampledTokens sampled;
    TokenSet chosen;
    ScoredSet united;
    std::vector<float> scores;  ///< one head's samples
    std::vector<float> anyway;  ///< one head's scores of what it attends anyway
  };

  /// What is attended whatever the curve says: tokens before `sink_end` and from `recent_begin` on, clustered or not.
  struct Anyway {
    std::uint32_t sink_end, recent_begin, tokens;
    [[nodiscard]] bool holds(std::uint32_t token) const noexcept { return token < sink_end || token >= recent_begin; }
    template <class Visit>
    void for_each(const Visit& visit) const {
      for (std::uint32_t token = 0; token < sink_end; ++token) visit(token);
      for (std::uint32_t token = recent_begin; token < tokens; ++token) visit(token);
    }
  };

  template <class Visit>
  static void for_each_sample(const FitSamples& samples, const Head& head, std::uint32_t h, const Visit& visit) {
    for (const ListRange range : {samples.head, samples.near, samples.far}) {
      for_each_in_order(head.source.index(), head.source.order(h), range.begin, range.end, visit);
    }
  }

  void sample(const HeadContext& context, const FitSamples& samples, const Anyway& anyway, const Head& head,
              Scratch& scratch) const {
    scratch.sampled.reset(context.tokens);
    anyway.for_each([&](std::uint32_t token) { scratch.sampled.add(token); });
    for (std::uint32_t h = 0; h < group_; ++h) {
      for_each_sample(samples, head, h, [&](std::uint32_t token, std::uint32_t) { scratch.sampled.add(token); });
    }
    scratch.sampled.score(context.tokens, context.q, group_, spec_.estimate, *context.kv);
  }

  /// Adds what query head `h` attends, at most `most` tokens; returns how many that are.
  std::uint32_t choose(std::uint32_t h, const FitSamples& samples, const Anyway& anyway, std::uint32_t most,
                       const Head& head, Scratch& scratch) const {
    scratch.anyway.clear();
    anyway.for_each([&](std::uint32_t token) { scratch.anyway.push_back(scratch.sampled.of(token, h)); });
    scratch.scores.clear();
    for_each_sample(samples, head, h, [&](std::uint32_t token, std::uint32_t) {
      // In the list, too, what is attended anyway would count twice.
      scratch.scores.push_back(anyway.holds(token) ? -std::numeric_limits<float>::infinity()
                                                   : scratch.sampled.of(token, h));
    });
    const std::uint32_t budget =
        std::min(fitted_budget(scratch.scores, samples, static_cast<double>(spec_.budget.mass), scratch.anyway), most);
    for_each_in_order(head.source.index(), head.source.order(h), 0, budget,
                      [&](std::uint32_t token, std::uint32_t) { scratch.chosen.add(token); });
    return budget;
  }

  /// Far tokens from `begin` on: those in no cluster.
  [[nodiscard]] static std::uint32_t in_no_cluster(const HeadContext& context, std::uint32_t begin) {
    thread_local SelectionRow far;
    far.clear();
    add_far_runs(*context.near, begin, context.tokens, far);
    return static_cast<std::uint32_t>(far.attended());
  }

  /// Of the far tokens from `begin` on each query head attends its best.
  void select_best(const HeadContext& context, std::uint32_t begin, std::uint32_t most, SelectionRow& row,
                   SelectCounters& counters) const {
    thread_local TokenSet apart;
    thread_local ScoredSet scored;
    apart.reset(context.tokens);
    apart.add_range(begin, context.tokens);
    scored.collect({.sets = {&apart, 1}, .active = ~0u >> (32 - group_), .shared = true}, *context.near);
    scored.score(*context.kv, context.q, group_);
    scored.choose(most, group_, *context.kv);
    scored.emit(group_, Membership::united, row);
    counters.expanded_per_head += std::uint64_t{most} * group_;
    counters.candidates += scored.united();
    counters.near_hits += scored.near_hits();
    counters.scored += scored.size();
    scored.release();
  }

  PolicySpec spec_;
  RowShape shape_;
  std::uint32_t group_;
  std::vector<Head> heads_;  ///< [kv_heads]
};

}  // namespace

std::uint64_t fitted_state_bytes(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t tokens) noexcept {
  return ClusterSource::most_heap_bytes(spec.clusters, shape, tokens);
}

std::unique_ptr<LayerPolicy> make_fitted_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                std::uint32_t page_tokens) {
  return std::make_unique<FittedPolicy>(spec, shape, page_tokens);
}

}  // namespace sluice::scheduler
