// ArkVale (Chen et al., NeurIPS 2024): pages of 32 tokens, ranked by a shrunken box around their keys, 1,280 tokens'
// worth attended whole; two sink pages and two window pages are always near; the first two layers attend densely.
// Each query head ranks its own pages and the group attends the union, as with other page sources. The published code
// ranks one set of pages for a whole layer: `arkvale:rank=layer`.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/policy/page_order.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::scheduler {

PolicySpec arkvale_spec() {
  PolicySpec spec;
  spec.name = "arkvale";
  spec.sources = static_cast<std::uint16_t>(Source::pages);
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 1, .min_tokens = 1280, .share = 0.f};
  spec.budget.share = 1.f;
  spec.near = {.sink_tokens = 64, .recent_tokens = 64, .share = 0.f};
  spec.dense_layers = 2;
  spec.page_tokens = 32;
  return spec;
}

namespace {

/// Each KV head finds the pages of its layer by itself: that is a sum over scores, and there is nothing to keep.
class LayerPagesPolicy final : public LayerPolicy {
 public:
  LayerPagesPolicy(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t page_tokens)
      : spec_(spec), shape_(row_shape(shape, page_tokens)) {}

  void begin(const PromptContext&) override {}
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override {
    return std::make_unique<LayerPagesPolicy>(*this);
  }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    if (shape_.kv_heads != 1 && context.layer == nullptr)
      throw Error(Errc::invalid_argument, "rank=layer adds up all heads of a layer, which the step does not give");
    thread_local std::vector<float> sums;  // They order like the means.
    sums.assign(context.page_scores.size() / shape_.group(), 0.f);
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv)
      add(context.layer == nullptr ? context.page_scores : context.layer->page_scores(kv), sums);
    const auto pages = static_cast<std::uint32_t>(sums.size());
    thread_local std::vector<std::uint32_t> best;
    const PageRun open = far_part(*context.near, pages, context.tokens);
    best.resize(picks(pages, open.tokens(), context.tokens));
    if (!best.empty()) (void)select_top_k(sums.data(), pages, static_cast<std::uint32_t>(best.size()), best.data());
    for (const std::uint32_t page : best) take(far_part(*context.near, page, context.tokens), row);
    take(open, row);
    counters.candidates += row.attended();
    counters.expanded_per_head += row.attended() * shape_.group();
  }

 private:
  /// `scores` [group, pages]
  static void add(std::span<const float> scores, std::vector<float>& sums) {
    for (std::size_t at = 0; at + sums.size() <= scores.size() && !sums.empty(); at += sums.size())
      for (std::size_t page = 0; page < sums.size(); ++page) sums[page] += scores[at + page];
  }

  /// Of far tokens that have a budget the open page is part.
  [[nodiscard]] std::uint32_t picks(std::uint32_t pages, std::uint32_t open, std::uint32_t tokens) const noexcept {
    const std::uint32_t most = far_tokens_per_head(spec_.far, tokens, shape_);
    return std::min(budget_pages(spec_.pages, pages, shape_.page_tokens),
                    (most - std::min(open, most)) / shape_.page_tokens);
  }

  static void take(const PageRun& run, SelectionRow& row) {
    if (run.tokens() != 0) row.runs.push_back(run);
  }

  PolicySpec spec_;
  RowShape shape_;
};

}  // namespace

std::unique_ptr<LayerPolicy> make_layer_pages_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                     std::uint32_t page_tokens) {
  return std::make_unique<LayerPagesPolicy>(spec, shape, page_tokens);
}

}  // namespace sluice::scheduler
