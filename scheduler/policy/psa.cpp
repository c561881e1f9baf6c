// Progressive sparse attention (PSA, arXiv 2503.00392) by the CPU: pages in the order of their digest scores, a
// microbatch at a time, until the share of the softmax mass that they hold passes the budget's. One order and one
// verdict per KV head: by the mean score of its query heads, and when the last of them has enough.

#include <algorithm>
#include <memory>
#include <vector>

#include "scheduler/fast_exp.hpp"
#include "scheduler/policy/page_order.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/step/progress.hpp"

namespace sluice::scheduler {

PolicySpec psa_spec() {
  PolicySpec spec;
  spec.name = "psa";
  spec.sources = static_cast<std::uint16_t>(Source::pages);
  spec.pages.digest = DigestKind::cuboid_mean;
  spec.budget = {.kind = BudgetKind::progressive, .mass = 0.95f, .microbatch = 4, .rule = ProgressRule::least};
  spec.near = {.sink_tokens = 0, .recent_tokens = 0, .share = 0.f};
  spec.page_tokens = 32;
  return spec;
}

namespace {

/// Far tokens whose scores were read: a page's, or part of them.
struct Visited {
  PageRun run;
  std::size_t first = 0;  ///< row of `scores`
};

/// Scratch of one selection.
struct Head {
  PageOrder order;
  std::vector<ProgressState> states;  ///< [group]
  std::vector<PageRun> batch;         ///< runs of a microbatch
  std::vector<std::uint32_t> tokens;  ///< of what is scored at once
  std::vector<float> near_scores;     ///< [near tokens and those of the open page, group]
  std::vector<float> scores;          ///< [visited tokens, group], in the order of visits
  std::vector<float> masses;          ///< [pages of a microbatch, group]
  std::vector<Visited> visited;
};

class ProgressivePolicy final : public LayerPolicy {
 public:
  ProgressivePolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens)
      : budget_(spec.budget),
        estimate_(spec.estimate),
        far_(spec.far),
        group_(shape.group()),
        shape_(shape),
        page_tokens_(page_tokens) {}

  void begin(const PromptContext&) override {}
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override {
    return std::make_unique<ProgressivePolicy>(*this);
  }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    thread_local Head head;
    head.states.assign(group_, ProgressState{});
    head.visited.clear();
    head.scores.clear();
    head.order.rank(context.page_scores, group_, *context.near, context.tokens);
    visit_open(context, head, counters);
    const std::uint64_t most = most_far(context.tokens);
    for (std::uint32_t pages = next_pages(head, most); pages != 0 && !enough(head); pages = next_pages(head, most)) {
      visit_microbatch(context, head, pages);
      ++counters.iterations;
    }
    emit(head, row);
    (estimates() ? counters.estimated : counters.scored) += row.tokens.size();
    counters.candidates += row.tokens.size();
    counters.expanded_per_head += row.tokens.size() * group_;
  }

 private:
  /// Whether pages are weighed by copies of their keys.
  [[nodiscard]] bool estimates() const noexcept { return estimate_ == Estimate::int4; }
  void score(const HeadContext& context, std::span<const std::uint32_t> tokens, float* out) const {
    if (estimates()) return context.kv->estimate(context.q, tokens, out);
    context.kv->score(context.q, tokens, out);
  }

  /// Of `tokens` visible ones: the query heads attend the same, so that their parts of the budget are one.
  [[nodiscard]] std::uint64_t most_far(std::uint32_t tokens) const noexcept {
    return std::uint64_t{group_} * far_tokens_per_head(far_, tokens, row_shape(shape_, page_tokens_));
  }

  /// Pages of the next microbatch: fewer where far tokens have a budget that ends before it does, or none.
  [[nodiscard]] std::uint32_t next_pages(const Head& head, std::uint64_t most) const noexcept {
    if (far_.all()) return budget_.microbatch;
    const std::uint64_t attended = head.scores.size() / group_;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(budget_.microbatch, (most - std::min(most, attended)) / page_tokens_));
  }

  /// What is attended anyway counts first: sinks, recent tokens and the open page.
  void visit_open(const HeadContext& context, Head& head, SelectCounters& counters) const {
    const NearSet& near = *context.near;
    const auto open_page = static_cast<std::uint32_t>(context.page_scores.size() / group_);
    const PageRun open = far_part(near, open_page, context.tokens);
    const std::uint32_t open_begin = open_page * page_tokens_ + open.begin;
    head.tokens.clear();
    for (std::uint32_t t = 0; t < std::min(near.sink_end, context.tokens); ++t) head.tokens.push_back(t);
    const std::size_t first_open = head.tokens.size();
    for (std::uint32_t t = open_begin; t < open_begin + open.tokens(); ++t) head.tokens.push_back(t);
    for (std::uint32_t t = std::max(near.recent_begin, near.sink_end); t < context.tokens; ++t)
      head.tokens.push_back(t);
    if (head.tokens.empty()) return;

    head.near_scores.resize(head.tokens.size() * group_);
    score(context, head.tokens, head.near_scores.data());
    for (std::uint32_t h = 0; h < group_; ++h) add_mass(head.states[h], log_sum(head.near_scores, h));
    const std::uint64_t near_tokens = head.tokens.size() - open.tokens();
    (estimates() ? counters.estimated : counters.scored) += near_tokens;
    counters.near_hits += near_tokens;
    counters.candidates += near_tokens;
    if (open.tokens() == 0) return;
    head.visited.push_back({.run = open, .first = 0});
    const auto from = head.near_scores.begin() + static_cast<std::ptrdiff_t>(first_open * group_);
    head.scores.insert(head.scores.end(), from, from + static_cast<std::ptrdiff_t>(open.tokens() * group_));
  }

  /// Whether every query head has attended enough.
  [[nodiscard]] bool enough(Head& head) const {
    const std::uint32_t left = head.order.left();
    if (left == 0) return true;
    if (!pass(head, left, {})) return false;
    // What is certified passes without its bound, too; so the bound, which is dear, can wait until then.
    return budget_.rule != ProgressRule::certified || pass(head, left, head.order.bounds(shape_));
  }

  [[nodiscard]] bool pass(const Head& head, std::uint32_t left, std::span<const float> bounds) const noexcept {
    for (std::uint32_t h = 0; h < group_; ++h) {
      const float share = progress_share(head.states[h], left, bounds.empty() ? kEmptyLse : bounds[h]);
      if (!passes(share, budget_.mass, left)) return false;
    }
    return true;
  }

  void visit_microbatch(const HeadContext& context, Head& head, std::uint32_t pages) const {
    head.batch.clear();
    const std::uint32_t full = head.order.take(pages, head.batch);
    const std::size_t first = head.scores.size() / group_;
    read_scores(context, head, first);
    head.masses.resize(head.batch.size() * group_);
    std::size_t at = first;
    std::size_t next_full = 0;
    std::size_t next_other = full;
    for (const PageRun& run : head.batch) {
      const std::size_t place = run.tokens() == page_tokens_ ? next_full++ : next_other++;
      const auto scores = std::span<const float>(head.scores).subspan(at * group_, run.tokens() * group_);
      for (std::uint32_t h = 0; h < group_; ++h) head.masses[place * group_ + h] = log_sum(scores, h);
      head.visited.push_back({.run = run, .first = at});
      at += run.tokens();
    }
    for (std::uint32_t h = 0; h < group_; ++h) {
      add_pages(head.states[h], budget_.rule,
                {.first = head.masses.data() + h,
                 .pages = static_cast<std::uint32_t>(head.batch.size()),
                 .full = full,
                 .stride = group_});
    }
  }

  /// Scores of the microbatch's tokens, in ascending order of its pages, which it is left in.
  void read_scores(const HeadContext& context, Head& head, std::size_t first) const {
    std::sort(head.batch.begin(), head.batch.end(), [](const PageRun& a, const PageRun& b) { return a.page < b.page; });
    head.tokens.clear();
    for (const PageRun& run : head.batch) {
      for (std::uint32_t i = run.begin; i < run.end; ++i) head.tokens.push_back(run.page * page_tokens_ + i);
    }
    head.scores.resize((first + head.tokens.size()) * group_);
    score(context, head.tokens, head.scores.data() + first * group_);
  }

  /// Log-sum-exp of one head's scores; what is no number weighs nothing.
  [[nodiscard]] float log_sum(std::span<const float> scores, std::uint32_t h) const noexcept {
    float top = kEmptyLse;
    for (std::size_t i = h; i < scores.size(); i += group_) top = scores[i] > top ? scores[i] : top;
    if (std::isinf(top)) return top;
    float sum = 0.f;
    for (std::size_t i = h; i < scores.size(); i += group_) sum += fast_exp(scores[i] - top);
    return top + std::log(sum);
  }

  /// Everything visited, ascending, with its scores, unless they are estimates: K need not be read again.
  void emit(Head& head, SelectionRow& row) const {
    std::sort(head.visited.begin(), head.visited.end(),
              [](const Visited& a, const Visited& b) { return a.run.page < b.run.page; });
    if (!estimates()) row.scores.reserve(head.scores.size());
    row.tokens.reserve(head.scores.size() / group_);
    for (const Visited& page : head.visited) {
      for (std::uint32_t i = page.run.begin; i < page.run.end; ++i)
        row.tokens.push_back(page.run.page * page_tokens_ + i);
      if (estimates()) continue;
      const auto from = head.scores.begin() + static_cast<std::ptrdiff_t>(page.first * group_);
      row.scores.insert(row.scores.end(), from, from + static_cast<std::ptrdiff_t>(page.run.tokens() * group_));
    }
  }

  BudgetOptions budget_;
  Estimate estimate_;
  FarOptions far_;
  std::uint32_t group_;
  AttentionShape shape_;
  std::uint32_t page_tokens_;
};

}  // namespace

std::unique_ptr<LayerPolicy> make_progressive_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                     std::uint32_t page_tokens) {
  return std::make_unique<ProgressivePolicy>(spec, shape, page_tokens);
}

}  // namespace sluice::scheduler
