#include <algorithm>
#include <cmath>

#include "scheduler/policy/policies.hpp"
#include "sluice/engine_options.hpp"

namespace sluice {

const std::vector<PolicyPreset>& policy_presets() {
  using namespace scheduler;
  static const std::vector<PolicyPreset> presets = {
      {full_spec(), "dense attention over every token"},
      {topk_spec(), "exact top-k per query head: the oracle, it reads every key"},
      {streaming_spec(), "sinks and a recent window (StreamingLLM)"},
      {quest_spec(), "pages ranked by a bound of their scores (Quest)"},
      {arkvale_spec(), "pages ranked by the cuboid mean of their keys (ArkVale)"},
      {psa_spec(), "pages in ranked order until the share attended is enough (PSA)"},
      {twilight_spec(), "Quest's pages pruned by 4-bit keys and top-p (Twilight)"},
      {tactic_spec(), "key clusters in ranked order, as many as a fitted curve says (Tactic)"},
      {magicpig_spec(), "tokens sampled by hash collisions, corrected for their chance (MagicPIG)"},
      {double_sparsity_spec(), "tokens ranked by a few channels of their keys (Double Sparsity)"},
      {snapkv_spec(), "what the prompt's last queries attended, chosen once (SnapKV)"},
      {pyramidkv_spec(), "SnapKV with budgets that fall from layer to layer (PyramidKV)"},
      {adakv_spec(), "SnapKV with a budget that a layer's heads share by need (Ada-KV)"},
      {vattention_spec(), "the best tokens and a sample of the others that bounds the error (vAttention)"},
      {adamas_spec(), "tokens ranked by 2 bits of each channel of their Hadamard transforms (Adamas)"},
      {infinigen_spec(), "tokens ranked before the layer begins, by a few skewed channels (InfiniGen)"},
      {lfps_spec(), "candidates from attention history (LFPS)"},
      {sluice_spec(), "tokens drawn by 4-bit copies of all keys, divided by their chance: the default"},
  };
  return presets;
}

std::vector<PolicySpec> default_policies() { return {scheduler::sluice_spec()}; }

}  // namespace sluice

namespace sluice::scheduler {
namespace {

/// max(least, share * all), at most all. Rounded to nearest: 2% of 5,000 is 100 although 0.02f is a little less.
std::uint32_t share_of(std::uint32_t all, std::uint32_t least, float share) noexcept {
  const auto part = static_cast<std::uint32_t>(std::llround(static_cast<double>(share) * all));
  return std::min(std::max(least, part), all);
}

}  // namespace

std::uint32_t budget_tokens(const BudgetOptions& budget, std::uint32_t n) noexcept {
  return share_of(n, budget.min_tokens, budget.share);
}

std::uint32_t budget_tokens(const LabelOptions& options, std::uint32_t n) noexcept {
  return share_of(n, options.min_tokens, options.share);
}

std::uint32_t budget_pages(const PageSourceOptions& options, std::uint32_t pages, std::uint32_t page_tokens) noexcept {
  const auto tokens_in_pages = static_cast<std::uint32_t>(div_up(options.min_tokens, page_tokens));
  return share_of(pages, std::max(options.min_pages, tokens_in_pages), options.share);
}

std::uint64_t far_tokens(const FarOptions& far, std::uint32_t n, const RowShape& shape) noexcept {
  const std::uint64_t all = std::uint64_t{n} * shape.kv_heads;
  if (far.all()) return all;
  const auto part = std::llround(static_cast<double>(far.share) * static_cast<double>(all));
  return std::max<std::uint64_t>(far.min_tokens, static_cast<std::uint64_t>(part));
}

std::uint32_t far_tokens_per_head(const FarOptions& far, std::uint32_t n, const RowShape& shape) noexcept {
  if (far.all()) return n;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(far_tokens(far, n, shape) / shape.q_heads, n));
}

std::uint32_t tokens_per_head(const PolicySpec& spec, std::uint32_t n, const RowShape& shape) noexcept {
  return std::min(budget_tokens(spec.budget, n), far_tokens_per_head(spec.far, n, shape));
}

std::uint32_t most_tokens_per_head(const PolicySpec& spec, std::uint32_t n, const RowShape& shape) noexcept {
  constexpr std::uint64_t kUsualMost = 4;  // Times as many: a bar is halved.
  const std::uint32_t least = tokens_per_head(spec, n, shape);
  if (spec.budget.kind != BudgetKind::drawn || spec.budget.draw_error == 0.f) return least;
  const std::uint64_t most = spec.budget.draw_most != 0 ? spec.budget.draw_most : kUsualMost * least;
  return std::max(least, static_cast<std::uint32_t>(
                             std::min<std::uint64_t>(most, std::min(n, far_tokens_per_head(spec.far, n, shape)))));
}

bool ranks_itself(const PolicySpec& spec) noexcept {
  return spec.uses(Source::pages) &&
         (spec.budget.kind == BudgetKind::progressive || spec.pages.rank == PageRank::layer);
}

std::unique_ptr<LayerPolicy> make_layer_policy(const PolicySpec& spec, const AttentionShape& shape,
                                               std::uint32_t page_tokens, LayerId layer) {
  validate(spec);
  if (spec.dense(layer.value) || spec.uses(Source::all)) return make_full_policy();
  if (spec.sources == 0) return make_streaming_policy();
  if (spec.uses(Source::scores))
    throw Error(Errc::unsupported, "scores are brought to attend of an Engine, where its device chooses by them");
  if (spec.estimate == Estimate::int3)
    throw Error(Errc::unsupported, "int3 estimates on the device of an Engine, which has the 3-bit copies; write int4");
  if (spec.uses(Source::pages) && spec.pages.rank == PageRank::layer)
    return make_layer_pages_policy(spec, shape, page_tokens);
  switch (spec.budget.kind) {
    case BudgetKind::progressive: return make_progressive_policy(spec, shape, page_tokens);
    case BudgetKind::fitted: return make_fitted_policy(spec, shape, page_tokens);
    case BudgetKind::sampled: return make_sampled_policy(spec, shape);
    case BudgetKind::verified: return make_verified_policy(spec, shape, page_tokens, layer);
    case BudgetKind::within: return make_within_policy(spec, shape, page_tokens);
    case BudgetKind::drawn:
      throw Error(Errc::unsupported, "sample is chosen by the device of an Engine, which has the 4-bit copies");
    case BudgetKind::top_k:
    case BudgetKind::top_p: break;
  }
  return make_sparse_policy(spec, shape, page_tokens, layer);
}

std::uint64_t policy_state_bytes(const PolicySpec& spec, const AttentionShape& shape, std::uint32_t tokens,
                                 std::span<const std::uint32_t> windows) noexcept {
  const BudgetKind kind = spec.budget.kind;
  const bool keeps = !ranks_itself(spec) && kind != BudgetKind::verified;
  if (spec.sources == 0 || spec.uses(Source::all) || spec.uses(Source::scores) || !keeps) return 0;
  std::uint64_t sparse_layers = 0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    sparse_layers += spec.dense(layer) || (!windows.empty() && windows[layer] != 0) ? 0 : 1;
  const std::uint64_t head = kind == BudgetKind::fitted    ? fitted_state_bytes(spec, shape, tokens)
                             : kind == BudgetKind::sampled ? sampled_state_bytes(spec, shape, tokens)
                             : kind == BudgetKind::within  ? within_state_bytes(spec, shape, tokens)
                                                           : sparse_state_bytes(spec, shape, tokens);
  return sparse_layers * shape.kv_heads * head;
}

}  // namespace sluice::scheduler
