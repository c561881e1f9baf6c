// MagicPIG (Chen et al., arXiv 2410.16179), with the parameters of its serving code. Where its parts are:
//   hashing           lsh/projections.cpp, lsh/hash_tables.cpp
//   centring, u_j     lsh/lsh_source.cpp
//   the estimate      here: softmax over what is attended exactly and over the sample, each sampled score lowered by
//                     the logarithm of the chance that it got into the sample
// Sinks, the prompt's last tokens and everything generated are attended exactly. The paper subtracts the mean key from
// all keys; this shifts all scores of a query by one number, so that plain scores give the same softmax.

#include <bit>
#include <cmath>
#include <memory>
#include <vector>

#include "scheduler/lsh/lsh_source.hpp"
#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"

namespace sluice::scheduler {

PolicySpec magicpig_spec() {
  PolicySpec spec;
  spec.name = "magicpig";
  spec.sources = static_cast<std::uint16_t>(Source::lsh);
  spec.budget.kind = BudgetKind::sampled;
  spec.near = {.sink_tokens = 4, .recent_tokens = 64, .share = 0.f};
  spec.dense_every = 16;
  return spec;
}

namespace {

class SampledPolicy final : public LayerPolicy {
 public:
  SampledPolicy(const PolicySpec& spec, const AttentionShape& shape)
      : group_(shape.group()), heads_(shape.kv_heads, Head(spec, shape)) {}

  void begin(const PromptContext& prompt) override { heads_[prompt.kv_head].source.begin(prompt); }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    Head& head = heads_[context.kv_head];
    bypass.heads = 0;
    add_far_runs(*context.near, head.source.end(), context.tokens, row);
    const std::uint32_t exact = context.tokens - head.source.end();
    counters.candidates += exact;
    counters.expanded_per_head += std::uint64_t{exact} * group_;
    if (head.source.empty()) return;

    head.source.hash(context.q, *context.kv);
    for (std::uint32_t h = 0; h < group_; ++h) {
      head.sampled[h].reset(head.source.end());
      head.source.add_collisions(h, head.sampled[h]);
      counters.index_bytes += head.source.lookup_bytes();
      counters.expanded_per_head += head.sampled[h].size();
    }
    head.scored.collect({.sets = head.sampled, .active = ~0u >> (32 - group_), .shared = false, .keep_near = false},
                        *context.near);
    head.scored.score(*context.kv, context.q, group_);
    head.scored.choose_all();
    head.scored.emit(group_, Membership::own, row);
    correct(head.source, row);
    counters.candidates += head.scored.united();
    counters.near_hits += head.scored.near_hits();
    counters.scored += head.scored.size();
    head.scored.release();
  }

  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<SampledPolicy>(*this); }
  /// Hash tables are of the prompt alone.
  void truncate(std::uint32_t kv_head, std::uint32_t) noexcept override { heads_[kv_head].scored.release(); }
  [[nodiscard]] std::uint64_t heap_bytes(std::uint32_t kv_head) const noexcept override {
    const Head& head = heads_[kv_head];
    return head.source.heap_bytes() + head.scored.heap_bytes() + scheduler::heap_bytes(head.sampled);
  }

 private:
  struct Head {
    Head(const PolicySpec& spec, const AttentionShape& shape)
        : source(spec.lsh, shape, spec.near.sink_tokens), sampled(shape.group()) {}
    LshSource source;
    std::vector<TokenSet> sampled;  ///< [group]
    ScoredSet scored;
  };

  /// Importance sampling: a token that got into the sample with chance u stands for 1 / u of its kind.
  void correct(const LshSource& source, SelectionRow& row) const {
    constexpr float kLeast = 1e-4f;  // Bounds what a token sampled against all odds may weigh.
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      for (std::uint32_t heads = row.members[i]; heads != 0; heads &= heads - 1) {
        const auto h = static_cast<std::uint32_t>(std::countr_zero(heads));
        float& score = row.scores[i * group_ + h];
        score -= std::log(source.probability(h, row.tokens[i], score) + kLeast);
      }
    }
  }

  std::uint32_t group_;
  std::vector<Head> heads_;  ///< [kv_heads]
};

}  // namespace

std::uint64_t sampled_state_bytes(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t tokens) noexcept {
  return LshSource::most_heap_bytes(spec.lsh, shape, tokens) +
         shape.group() * (sizeof(TokenSet) + TokenSet::most_heap_bytes(tokens));
}

std::unique_ptr<LayerPolicy> make_sampled_policy(const PolicySpec& spec, const AttentionShape& shape) {
  return std::make_unique<SampledPolicy>(spec, shape);
}

}  // namespace sluice::scheduler
