// vAttention (Desai et al., arXiv 2510.05688): the best tokens, and a uniform sample of the others, as large as a bound
// of the error asks for. Per query head, of the R tokens that are neither near nor among its best:
//   1. a first sample, of `sample` of them, gives the mean m and the deviation s of their softmax weights
//   2. D = (weights of near and best tokens) + R m, the estimate of the denominator
//   3. the sample is enlarged to b = (z R s / (error D))^2 tokens, P(|N(0,1)| > z) = delta: the central limit theorem
//   4. softmax over what is attended, each sampled score raised by ln(R / b), as many of its kind as it stands for
// The paper bounds numerator, denominator or both, and finds the best by any top-k; this is its denominator form, with
// the best by their keys or by 4-bit copies. Its code takes z one-sided, and samples with replacement; without it the
// error is smaller. The sample is drawn anew in every step, the same one for all heads of a group as far as their best
// tokens allow, so that the group reads few keys.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "scheduler/policy/budget.hpp"
#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::scheduler {

PolicySpec vattention_spec() {
  PolicySpec spec;
  spec.name = "vattention";
  spec.sources = static_cast<std::uint16_t>(Source::exact);
  spec.budget.kind = BudgetKind::verified;
  spec.near = {.sink_tokens = 128, .recent_tokens = 128, .share = 0.f};
  return spec;
}

double two_sided_normal(double delta) noexcept {
  double low = 0.0, high = 40.0;  // erfc of the latter is 0.
  for (int i = 0; i < 100; ++i) {
    const double z = (low + high) / 2;
    (std::erfc(z / std::sqrt(2.0)) > delta ? low : high) = z;
  }
  return low;
}

namespace {

/// Fewer tell nothing about a deviation.
constexpr std::uint32_t kLeastSample = 32;

/// Sums of one query head's softmax weights, relative to exp(top).
struct Weights {
  double top = -std::numeric_limits<double>::infinity();
  double sum = 0.0;
  double squares = 0.0;
  std::uint32_t count = 0;

  void add(float score) {
    ++count;
    const auto s = static_cast<double>(score);
    if (!(s > -std::numeric_limits<double>::infinity())) return;  // NaN and -inf weigh nothing.
    raise(s);
    const double weight = std::exp(s - top);
    sum += weight;
    squares += weight * weight;
  }
  void raise(double to) {
    if (!(to > top)) return;
    const double factor = std::exp(top - to);
    sum *= factor;
    squares *= factor * factor;
    top = to;
  }
};

/// What one selection needs and nothing after it. Positions are those of ScoredSet::tokens: the far tokens.
struct Scratch {
  std::vector<TokenSet> candidates;
  ScoredSet ranked;
  SelectionRow best;
  std::vector<std::uint32_t> best_of;      ///< [far] bit h: among the best of head h
  std::vector<std::uint32_t> drawn;        ///< positions in the order in which they are drawn
  std::vector<std::uint32_t> sampled_of;   ///< [drawn] bit h: in the sample of head h
  std::vector<std::uint32_t> attended_of;  ///< [far] bit h: head h attends it
  std::vector<std::uint32_t> tokens;
  std::vector<float> scores;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

class VerifiedPolicy final : public LayerPolicy {
 public:
  VerifiedPolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens, LayerId layer)
      : spec_(spec),
        budget_(spec, row_shape(shape, page_tokens)),
        group_(shape.group()),
        layer_(layer.value),
        z_(two_sided_normal(static_cast<double>(spec.budget.delta))) {}

  void begin(const PromptContext&) override {}
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<VerifiedPolicy>(*this); }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    Scratch& scratch = scratch_of_thread();
    const std::uint32_t all_heads = ~0u >> (32 - group_);
    if (scratch.candidates.empty()) scratch.candidates.resize(1);
    scratch.candidates.front().reset(context.tokens);
    scratch.candidates.front().add_range(0, context.tokens);
    scratch.ranked.collect({.sets = scratch.candidates, .active = all_heads, .shared = true}, *context.near);
    counters.candidates += scratch.ranked.size();
    counters.expanded_per_head += scratch.ranked.size() * group_;
    const auto far = static_cast<std::uint32_t>(scratch.ranked.size());
    const std::uint32_t best = std::min(budget_tokens(spec_.budget, context.tokens), far);
    const std::uint32_t others = far - best;
    if (others <= kLeastSample) return add_far_runs(*context.near, context.tokens, row);

    find_best(context, best, scratch, counters);
    const auto share = static_cast<std::uint32_t>(std::ceil(static_cast<double>(spec_.budget.sample) * others));
    const std::uint32_t first = std::clamp(share, kLeastSample, others);
    std::vector<std::uint32_t> sizes(group_, first);
    draw(context, sizes, scratch);
    enlarge(context, others, sizes, scratch, counters);
    draw(context, sizes, scratch);
    emit(context, others, sizes, scratch, row, counters);
  }

 private:
  void find_best(const HeadContext& context, std::uint32_t best, Scratch& scratch, SelectCounters& counters) const {
    budget_.score(context, group_, scratch.ranked, counters);
    scratch.ranked.choose(best, group_, *context.kv);
    scratch.ranked.emit(group_, Membership::own, scratch.best);
    scratch.best_of.assign(scratch.ranked.size(), 0);
    const std::span<const std::uint32_t> far = scratch.ranked.tokens();
    std::size_t at = 0;
    for (std::size_t i = 0; i < scratch.best.tokens.size(); ++i) {
      while (far[at] != scratch.best.tokens[i]) ++at;
      scratch.best_of[at] = scratch.best.members[i];
    }
    scratch.drawn.clear();
  }

  /// The sample of head h is the first sizes[h] of a random order that are not among its best.
  void draw(const HeadContext& context, const std::vector<std::uint32_t>& sizes, Scratch& scratch) const {
    const auto far = static_cast<std::uint32_t>(scratch.ranked.size());
    const std::uint64_t seed =
        mixed_bits(mixed_bits((std::uint64_t{layer_} << 32) + context.kv_head + 1) + context.tokens);
    scratch.sampled_of.assign(scratch.drawn.size(), 0);
    for (std::uint32_t h = 0; h < group_; ++h) {
      std::uint32_t left = sizes[h];
      for (std::uint32_t i = 0; left != 0; ++i) {
        if (i == scratch.drawn.size()) {
          scratch.drawn.push_back(permuted(i, far, seed));
          scratch.sampled_of.push_back(0);
        }
        if (((scratch.best_of[scratch.drawn[i]] >> h) & 1) != 0) continue;
        scratch.sampled_of[i] |= 1u << h;
        --left;
      }
    }
  }

  /// Scores of `tokens`, ascending.
  void score(const HeadContext& context, Scratch& scratch, SelectCounters& counters) const {
    scratch.scores.resize(scratch.tokens.size() * group_);
    if (scratch.tokens.empty()) return;
    context.kv->score(context.q, scratch.tokens, scratch.scores.data());
    counters.scored += scratch.tokens.size();
  }

  /// What each head's sample has to be, by the first one.
  void enlarge(const HeadContext& context, std::uint32_t others, std::vector<std::uint32_t>& sizes, Scratch& scratch,
               SelectCounters& counters) const {
    std::vector<Weights> kept(group_), sampled(group_);
    scratch.tokens.clear();
    for (std::uint32_t token = 0; token < context.tokens; ++token) {
      if (context.near->contains(token)) scratch.tokens.push_back(token);
    }
    score(context, scratch, counters);
    for (std::size_t i = 0; i < scratch.scores.size(); ++i) kept[i % group_].add(scratch.scores[i]);
    score_far(context, scratch, counters,
              [&](std::uint32_t, float s, std::uint32_t h, bool is_best) { (is_best ? kept : sampled)[h].add(s); });
    for (std::uint32_t h = 0; h < group_; ++h) sizes[h] = size_for(kept[h], sampled[h], others, sizes[h]);
  }

  /// Scores what is among the best or sampled, and calls visit(index in `tokens`, score, head, whether it is among the
  /// head's best) for every head that attends it.
  template <class Visit>
  void score_far(const HeadContext& context, Scratch& scratch, SelectCounters& counters, const Visit& visit) const {
    const std::span<const std::uint32_t> far = scratch.ranked.tokens();
    scratch.attended_of.assign(far.size(), 0);
    for (std::size_t i = 0; i < scratch.drawn.size(); ++i)
      scratch.attended_of[scratch.drawn[i]] = scratch.sampled_of[i];
    scratch.tokens.clear();
    for (std::size_t i = 0; i < far.size(); ++i) {
      if ((scratch.attended_of[i] |= scratch.best_of[i]) != 0) scratch.tokens.push_back(far[i]);
    }
    score(context, scratch, counters);
    std::uint32_t index = 0;
    for (std::size_t i = 0; i < far.size(); ++i) {
      if (scratch.attended_of[i] == 0) continue;
      for (std::uint32_t heads = scratch.attended_of[i]; heads != 0; heads &= heads - 1) {
        const auto h = static_cast<std::uint32_t>(std::countr_zero(heads));
        visit(index, scratch.scores[std::size_t{index} * group_ + h], h, ((scratch.best_of[i] >> h) & 1) != 0);
      }
      ++index;
    }
  }

  [[nodiscard]] std::uint32_t size_for(Weights kept, Weights sampled, std::uint32_t others, std::uint32_t first) const {
    kept.raise(sampled.top);
    sampled.raise(kept.top);
    const double mean = sampled.sum / sampled.count;
    const double variance = std::max(sampled.squares - sampled.sum * mean, 0.0) / std::max(sampled.count - 1, 1u);
    const double off = static_cast<double>(spec_.budget.error) * (kept.sum + others * mean);
    const double size = z_ * z_ * others * (others * variance) / (off * off);
    // Where nothing weighs anything nothing is known: attend all.
    return size < others ? std::max(static_cast<std::uint32_t>(std::ceil(size)), first) : others;
  }

  void emit(const HeadContext& context, std::uint32_t others, const std::vector<std::uint32_t>& sizes, Scratch& scratch,
            SelectionRow& row, SelectCounters& counters) const {
    std::vector<float> stands_for(group_);
    for (std::uint32_t h = 0; h < group_; ++h)
      stands_for[h] = static_cast<float>(std::log(static_cast<double>(others) / sizes[h]));
    row.members.clear();
    score_far(context, scratch, counters, [&](std::uint32_t index, float s, std::uint32_t h, bool is_best) {
      if (index >= row.members.size()) row.members.resize(index + 1, 0);
      row.members[index] |= 1u << h;
      if (!is_best) scratch.scores[std::size_t{index} * group_ + h] = s + stands_for[h];
    });
    row.tokens = scratch.tokens;
    row.scores = scratch.scores;
  }

  PolicySpec spec_;
  Budget budget_;
  std::uint32_t group_;
  std::uint32_t layer_;
  double z_;
};

}  // namespace

std::unique_ptr<LayerPolicy> make_verified_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                  std::uint32_t page_tokens, LayerId layer) {
  return std::make_unique<VerifiedPolicy>(spec, shape, page_tokens, layer);
}

}  // namespace sluice::scheduler
