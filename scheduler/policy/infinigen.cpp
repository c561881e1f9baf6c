// InfiniGen (Lee et al., OSDI 2024): before layer l begins, its query is rehearsed with the attention input of layer
// l - 1, x, and what scores highest by a few channels is fetched. In layers from the third on:
//   1. q_h = x Wq_h, after RoPE; q_h and all keys k_j in skewed coordinates, a part of the channels
//                                                    labels/skewing.cpp, labels/skewed_cache.cpp
//   2. s_hj = q_h . k_j / sqrt(d)
//   3. count_h = #{ j : s_hj > max_j s_hj - alpha }, k = mean of count_h over the layer's query heads
//   4. each query head attends its k best tokens, one at least, 20% of the context at most, and the new one; with the
//      layer's real query, exactly
// What differs: the paper has as many KV heads as query heads; here the query heads of a group share their KV head's
// skewing and channels, which are the prompt's own instead of a sample text's. Its code averages counts over a batch,
// too; here a sequence is alone. (Its evaluation of accuracy on Llama takes head 0's maximum for that of all heads, by
// mistake; its serving code does as this.) No key leaves the host pool.

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "scheduler/labels/skewed_cache.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/error.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::scheduler {

PolicySpec infinigen_spec() {
  PolicySpec spec;
  spec.name = "infinigen";
  spec.sources = static_cast<std::uint16_t>(Source::exact);
  spec.estimate = Estimate::skewed;
  spec.rehearsed = true;
  spec.budget.kind = BudgetKind::within;
  spec.budget.min_tokens = 1;
  spec.budget.share = 0.2f;
  spec.near = {.sink_tokens = 0, .recent_tokens = 1, .share = 0.f};
  spec.dense_layers = 2;
  return spec;
}

namespace {

/// Of [tokens, group] scores, how many lie less than `alpha` below the best of their query head. NaN does not.
std::uint64_t count_within(const std::vector<float>& scores, std::uint32_t group, float alpha) {
  std::vector<float> least(group, -std::numeric_limits<float>::infinity());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    float& best = least[i % group];
    best = scores[i] > best ? scores[i] : best;
  }
  for (float& score : least) score -= alpha;
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) count += scores[i] > least[i % group] ? 1 : 0;
  return count;
}

class WithinPolicy final : public LayerPolicy {
 public:
  WithinPolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens)
      : spec_(spec), shape_(row_shape(shape, page_tokens)), heads_(shape.kv_heads, Head(spec.skewed_share, shape)) {}

  void begin(const PromptContext& prompt) override { heads_[prompt.kv_head].keys.begin(prompt); }
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<WithinPolicy>(*this); }

  void truncate(std::uint32_t kv_head, std::uint32_t tokens) noexcept override {
    const std::lock_guard lock(heads_[kv_head].mutex);
    heads_[kv_head].keys.truncate(tokens);
    heads_[kv_head].scores = {};
  }
  [[nodiscard]] std::uint64_t heap_bytes(std::uint32_t kv_head) const noexcept override {
    const std::lock_guard lock(heads_[kv_head].mutex);
    return heads_[kv_head].keys.heap_bytes() + scheduler::heap_bytes(heads_[kv_head].scores);
  }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    if (context.tokens == 0) return;
    const std::uint32_t heads = shape_.kv_heads;
    if (heads != 1 && context.layer == nullptr)
      throw Error(Errc::invalid_argument, "within averages over all heads of a layer, which the step does not give");
    // Threads of other heads begin elsewhere, and find counted what this one has counted.
    std::uint64_t counted = 0;
    for (std::uint32_t i = 0; i < heads; ++i) counted += count((context.kv_head + i) % heads, context);
    const std::vector<float> scores = take_scores(context.kv_head);
    const std::uint32_t before = context.tokens - 1;
    const auto mean = static_cast<std::uint32_t>(counted / shape_.q_heads);
    const std::uint32_t most = std::max(tokens_per_head(spec_, context.tokens, shape_), 1u);
    emit(context, scores, std::min(std::clamp(mean, 1u, most), before), row);
    counters.candidates += before;
    counters.expanded_per_head += std::uint64_t{before} * shape_.group();
    counters.estimated += before;
    counters.index_bytes += before * heads_[context.kv_head].keys.bytes_per_token();
  }

 private:
  /// Whichever thread needs a head's count first counts it, for all of them.
  struct Head {
    Head(float share, const AttentionShape& shape) : keys(share, shape) {}
    Head(const Head& other) : keys(other.keys) {}
    Head& operator=(const Head&) = delete;
    ~Head() = default;

    mutable std::mutex mutex;
    SkewedCache keys;
    std::uint64_t step = 0;  ///< that it was counted in, LayerReader::step
    std::uint64_t counted = 0;
    std::vector<float> scores;  ///< [tokens before the newest, group] until the head has chosen
  };

  [[nodiscard]] const float* query(std::uint32_t kv_head, const HeadContext& context) const {
    const bool own = kv_head == context.kv_head;
    if (!spec_.rehearsed) return own ? context.q : context.layer->q(kv_head);
    const float* const rehearsed = own ? context.rehearsed : context.layer->rehearsed(kv_head);
    if (rehearsed == nullptr)
      throw Error(Errc::invalid_argument,
                  "the policy chooses by rehearsed queries, and none were given; whoever runs the model has to hand "
                  "them to attend, or the stage rehearsed to be left out");
    return rehearsed;
  }

  /// Over the query heads of a KV head.
  std::uint64_t count(std::uint32_t kv_head, const HeadContext& context) {
    Head& head = heads_[kv_head];
    const std::uint32_t before = context.tokens - 1;
    const std::size_t size = std::size_t{before} * shape_.group();
    const bool own = kv_head == context.kv_head;
    const std::lock_guard lock(head.mutex);
    const bool counted = context.layer != nullptr && head.step == context.layer->step();
    if (counted && (!own || head.scores.size() == size)) return head.counted;
    const float* const q = query(kv_head, context);
    KvReader& kv = own ? *context.kv : context.layer->kv(kv_head);
    head.step = 0;  // Should something throw.
    head.keys.follow(before, kv);
    head.scores.resize(size);
    head.keys.estimate(q, before, kv, head.scores.data());
    head.counted = count_within(head.scores, shape_.group(), spec_.budget.alpha);
    if (context.layer != nullptr) head.step = context.layer->step();
    return head.counted;
  }

  [[nodiscard]] std::vector<float> take_scores(std::uint32_t kv_head) {
    const std::lock_guard lock(heads_[kv_head].mutex);
    return std::move(heads_[kv_head].scores);
  }

  /// The k best of each query head, and the newest token, as far as they are not near.
  void emit(const HeadContext& context, const std::vector<float>& scores, std::uint32_t k, SelectionRow& row) const {
    const std::uint32_t group = shape_.group();
    const std::uint32_t before = context.tokens - 1;
    thread_local std::vector<float> values;
    thread_local std::vector<std::uint32_t> best, members;
    members.assign(context.tokens, 0);
    members[before] = ~0u >> (32 - group);
    best.resize(k);
    for (std::uint32_t h = 0; h < group && k != 0; ++h) {
      values.resize(before);
      for (std::size_t i = 0; i < before; ++i) values[i] = scores[i * group + h];
      (void)select_top_k(values.data(), before, k, best.data());
      for (const std::uint32_t token : best) members[token] |= 1u << h;
    }
    for (std::uint32_t token = 0; token < context.tokens; ++token) {
      if (members[token] == 0 || context.near->contains(token)) continue;
      row.tokens.push_back(token);
      row.members.push_back(members[token]);
    }
  }

  PolicySpec spec_;
  RowShape shape_;
  std::vector<Head> heads_;  ///< [kv_heads]
};

}  // namespace

std::unique_ptr<LayerPolicy> make_within_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                std::uint32_t page_tokens) {
  return std::make_unique<WithinPolicy>(spec, shape, page_tokens);
}

std::uint64_t within_state_bytes(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t tokens) noexcept {
  return SkewedCache::most_heap_bytes(spec.skewed_share, shape, tokens + kUndoTokens);
}

}  // namespace sluice::scheduler
