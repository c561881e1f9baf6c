#pragma once

#include <cstdint>
#include <memory>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

// The presets, each in the file of its name, and the layer policies that specs compose.

[[nodiscard]] PolicySpec full_spec();
[[nodiscard]] PolicySpec topk_spec();
[[nodiscard]] PolicySpec streaming_spec();
[[nodiscard]] PolicySpec quest_spec();
[[nodiscard]] PolicySpec arkvale_spec();
[[nodiscard]] PolicySpec lfps_spec();
[[nodiscard]] PolicySpec sluice_spec();
[[nodiscard]] PolicySpec psa_spec();
[[nodiscard]] PolicySpec twilight_spec();
[[nodiscard]] PolicySpec tactic_spec();
[[nodiscard]] PolicySpec magicpig_spec();
[[nodiscard]] PolicySpec double_sparsity_spec();
[[nodiscard]] PolicySpec snapkv_spec();
[[nodiscard]] PolicySpec pyramidkv_spec();
[[nodiscard]] PolicySpec adakv_spec();
[[nodiscard]] PolicySpec vattention_spec();
[[nodiscard]] PolicySpec adamas_spec();
[[nodiscard]] PolicySpec infinigen_spec();

/// Attends everything: what a layer does whose source is `all`, or that the spec calls dense.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_full_policy();
/// Attends the near set only: no sources.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_streaming_policy();
/// Candidates of any union of sources but `all`, scored or estimated, and cut by top_k or top_p. `layer` decides whose
/// turn it is to observe, and what of a budget that falls from layer to layer is its own.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_sparse_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                              std::uint32_t page_tokens, LayerId layer);

/// Pages in the order of their digest scores until the share attended passes the budget's mass (PSA); needs
/// HeadContext::page_scores.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_progressive_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                                   std::uint32_t page_tokens);

/// Whole pages that rank highest for a layer: PageRank::layer (ArkVale); needs LayerReader::page_scores.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_layer_pages_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                                   std::uint32_t page_tokens);

/// The best clusters' tokens, as many as a curve fitted to sampled scores says: budget `fitted`, sources `clusters`.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_fitted_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                              std::uint32_t page_tokens);
/// Tokens whose hash meets the query's, corrected for that chance: budget `sampled`, sources `lsh`.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_sampled_policy(const PolicySpec& spec, const AttentionShape& shape);

/// The best tokens and a sample of the others that bounds the error: budget `verified`, sources `exact` (vAttention).
/// `layer` only decides which tokens are drawn.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_verified_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                                std::uint32_t page_tokens, LayerId layer);
/// The best tokens by skewed channels, as many as lie within `alpha` of the best on average: budget `within`
/// (InfiniGen).
[[nodiscard]] std::unique_ptr<LayerPolicy> make_within_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                              std::uint32_t page_tokens);
/// z of a standard normal variable that is outside [-z, z] with probability `delta` in (0, 1).
[[nodiscard]] double two_sided_normal(double delta) noexcept;

/// What such policies keep for a KV head of `tokens` tokens at most: see policy_state_bytes.
[[nodiscard]] std::uint64_t sparse_state_bytes(const PolicySpec& spec, const AttentionShape& shape,
                                               std::uint32_t tokens) noexcept;
[[nodiscard]] std::uint64_t fitted_state_bytes(const PolicySpec& spec, const AttentionShape& shape,
                                               std::uint32_t tokens) noexcept;
[[nodiscard]] std::uint64_t sampled_state_bytes(const PolicySpec& spec, const AttentionShape& shape,
                                                std::uint32_t tokens) noexcept;
[[nodiscard]] std::uint64_t within_state_bytes(const PolicySpec& spec, const AttentionShape& shape,
                                               std::uint32_t tokens) noexcept;

/// Appends to `row.runs` every token in [begin, tokens) that is not near; at most one run per page.
void add_far_runs(const NearSet& near, std::uint32_t begin, std::uint32_t tokens, SelectionRow& row);
inline void add_far_runs(const NearSet& near, std::uint32_t tokens, SelectionRow& row) {
  add_far_runs(near, 0, tokens, row);
}

}  // namespace sluice::scheduler
