#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"

namespace sluice {

/// Which tokens might matter? Sources unite.
enum class Source : std::uint16_t {
  all = 1,        ///< every token, unscored
  exact = 2,      ///< every token, estimated: the oracle
  history = 4,    ///< LFPS vertical and slash tables (arXiv 2506.15704, sections 4.2 and 4.4)
  pages = 8,      ///< tokens of the pages that rank highest by digest (Quest, ArkVale, PSA)
  clusters = 16,  ///< tokens of the k-means clusters whose centroids score highest (Tactic, arXiv 2502.12216)
  lsh = 32,       ///< tokens whose hash meets the query's in enough tables (MagicPIG, arXiv 2410.16179)
  snapshot = 64,  ///< what a prompt's last queries attended most, and all that is generated (SnapKV, arXiv 2404.14469)
  scores = 128,   ///< every token, by scores that the caller of `attend` brings, such as a trained indexer's
  labels = 256,   ///< the best tokens by q.k over a few channels of it (Double Sparsity, arXiv 2408.07092)
};

/// How much does each candidate matter?
enum class Estimate : std::uint8_t {
  exact,     ///< q.k of the key itself
  int4,      ///< q.k of a 4-bit copy of it (Twilight, arXiv 2502.02770 section 4.2)
  int3,      ///< q.k of a 3-bit copy of it; with top_k, top_p and sample of `exact` alone
  hadamard,  ///< by 2 bits of each channel of its Hadamard transform; with top_k (Adamas, arXiv 2510.18413)
  skewed,    ///< q.k over a few channels of both, turned so that few say most; with within (InfiniGen, OSDI 2024)
};

/// How many candidates are enough? Per query head; what a head keeps, its group attends.
enum class BudgetKind : std::uint8_t {
  top_k,        ///< max(min_tokens, share * n) of them
  top_p,        ///< the fewest that, with what is attended anyway, hold `mass`: see top_p.hpp (Twilight)
  fitted,       ///< likewise of all tokens, by a curve fitted to sampled scores; needs `clusters` alone (Tactic)
  progressive,  ///< whole pages by rank until the share attended passes `mass`; needs `pages` alone (PSA, arXiv
                ///< 2503.00392)
  sampled,      ///< every candidate, corrected for the chance that it became one; needs `lsh` alone (MagicPIG)
  verified,     ///< the best, and a sample of the others that bounds the error; needs `exact` alone (vAttention)
  within,       ///< as many as lie within `alpha` of a head's best, averaged over a layer's heads; needs `exact` alone,
                ///< and `skewed` (InfiniGen)
  drawn,        ///< max(min_tokens, share * n) of them, drawn without replacement by their estimated weight and divided
                ///< by the chance that they were drawn: see sample.hpp; needs `exact` alone, and `int4`
                ///< or `int3`
};

/// A score that decays more slowly gains less in a step than its 16 bits tell apart, see HistoryOptions.
inline constexpr float kMostHistoryDecay = 0.998f;

/// Which tables of the history propose candidates. The other one is kept as well, and says nothing.
enum class HistoryTables : std::uint8_t { both, vertical, slash };

/// Score tables over attention history (LFPS, arXiv 2506.15704). One pair of tables per query head.
struct HistoryOptions {
  float alpha = 0.2f;               ///< threshold = mean + alpha*(max-mean)/sqrt(kurtosis); larger selects less. (0, 10]
  float decay = 0.95f;              ///< factor per observed step. (0, kMostHistoryDecay]
  std::uint32_t init_queries = 32;  ///< last prompt queries that fill the tables. [1, 256]
  std::uint32_t local_tokens = 5;   ///< newest positions that are always candidates. [0, 4096]
  /// Candidates of a group's query heads are united before scoring: each head may pick what another found.
  bool share_in_group = false;
  /// Candidates that are near already are scored too, from their host copies, so that the tables keep
  /// following them. False: the tables forget a page while it is near. Costs their K rows on the CPU.
  bool observe_near = true;
  /// A layer feeds its tables in every N-th step; neighbouring layers take turns. The paper's is 1; more saves host
  /// work, and history moves slower than that. [1, 64]
  std::uint32_t observe_every = 1;
  /// A forecast that proposes more than this share of the context for a KV head says nothing and is left out, so that
  /// attention without pattern costs no more than the other sources do. 1: never. [0, 1] It is about what is forecast;
  /// what is attended at most FarOptions say.
  float limit = 1.f;
  HistoryTables tables = HistoryTables::both;
  /// Neighbours of candidates are candidates, too, if they are above the mean of a table (section 4.4).
  bool expand = true;
  friend bool operator==(const HistoryOptions&, const HistoryOptions&) = default;
};

/// Whose pages a ranking gives. `head`: each query head has its own. `layer`: one ranking for all heads of a layer, by
/// the mean score over its query heads, as ArkVale's code does (NeurIPS 2024); all of them attend the same pages.
enum class PageRank : std::uint8_t { head, layer };

/// Page ranking by digest, every step. Full pages are ranked; the open page is always a candidate.
struct PageSourceOptions {
  DigestKind digest = DigestKind::cuboid_mean;
  PageRank rank = PageRank::head;  ///< `layer` attends whole pages: with top_k of all candidates, and without a bypass
  /// Pages per query head, or per layer, are the largest of min_pages, min_tokens in pages, and a share of the
  /// sequence's pages.
  std::uint32_t min_pages = 8;   ///< [1, 65536]
  std::uint32_t min_tokens = 0;  ///< [0, 2^31)
  float share = 0.03f;           ///< [0, 1]
  friend bool operator==(const PageSourceOptions&, const PageSourceOptions&) = default;
};

/// K-means over the keys of a KV head, built when its first decode step begins.
struct ClusterOptions {
  std::uint32_t tokens_per_cluster = 32;     ///< mean size. [1, 1024]
  std::uint32_t iterations = 10;             ///< of Lloyd's, at most. [1, 100]
  std::uint32_t recluster_every = 2048;      ///< generated tokens that are attended exactly until they are clustered. [64, 2^20]
  std::uint32_t min_tokens = 512;            ///< a shorter prompt is attended densely. [0, 2^20]
  std::uint32_t candidates = 4096;           ///< tokens per query head that the source proposes to a budget other than `fitted`. [1, 2^31)
  float head_share = 0.015f;                 ///< of the clustered tokens: best ones scored exactly by `fitted`. (0, 0.1]
  float near_window = 0.1f;                  ///< where in the order the two windows of the fit are centred. (0, 1)
  float far_window = 0.6f;                   ///< (near_window + window_share, 1)
  float window_share = 0.005f;               ///< width of a window, of the clustered tokens; at least 16. (0, 0.1]
  friend bool operator==(const ClusterOptions&, const ClusterOptions&) = default;
};

/// Hash tables of `bits` sign bits of random projections of the centred keys, one set per KV head.
struct LshOptions {
  std::uint32_t bits = 10;            ///< K. [1, 16]
  std::uint32_t tables = 150;         ///< L. [1, 512]
  std::uint32_t min_collisions = 2;   ///< tables in which key and query must meet. 1 or 2
  std::uint32_t recent_prompt = 64;   ///< last prompt tokens, attended exactly like all generated ones. [0, 4096]
  std::uint64_t seed = 1;             ///< of the projections, the same for all layers
  friend bool operator==(const LshOptions&, const LshOptions&) = default;
};

/// How scores of neighbouring positions become one.
enum class Pooling : std::uint8_t { max, mean };

/// What of a prompt is kept when its first token is decoded, once for all: the rest is never attended again. Each KV
/// head keeps the prompt's last `window` tokens and those others which the queries of these attended most, by their
/// softmax weights, pooled over neighbouring positions and then averaged over the group. Generated tokens are all kept.
struct SnapshotOptions {
  std::uint32_t budget = 1024;  ///< tokens of a KV head, those of the window included. [1, 2^31)
  std::uint32_t window = 32;    ///< [1, 256]
  std::uint32_t kernel = 7;     ///< positions that are pooled, an odd number. [1, 63]
  Pooling pooling = Pooling::max;
  /// Budgets beside the window fall by equal steps from layer to layer, the last one to this part of the mean
  /// (PyramidKV, arXiv 2406.02069). 1: all alike. [1, 1000]
  std::uint32_t pyramid = 1;
  /// Share of a head's budget beside the window that is its own; the others go to the layer's KV heads by how many of
  /// their scores are among the layer's highest (Ada-KV, arXiv 2407.11550). 1: all of it. [0, 1]
  float floor = 1.f;
  friend bool operator==(const SnapshotOptions&, const SnapshotOptions&) = default;
};

/// The labels of a key are its channels that matter most to a prompt: those whose products |q * k| are largest, on the
/// average over the prompt's newest 32 queries and all its keys. Each query head ranks all tokens that are not attended
/// anyway by their labels.
struct LabelOptions {
  std::uint32_t channels = 16;  ///< of a label; all there are, if fewer. [1, 256]
  /// Tokens per query head: max(min_tokens, share * visible tokens).
  std::uint32_t min_tokens = 64;  ///< [1, 2^31)
  float share = 0.0625f;          ///< [0, 1]
  friend bool operator==(const LabelOptions&, const LabelOptions&) = default;
};

/// How many candidates each query head keeps.
struct BudgetOptions {
  BudgetKind kind = BudgetKind::top_k;
  std::uint32_t min_tokens = 64;  ///< top_k, verified, within, drawn: [1, 2^31)
  float share = 0.02f;  ///< top_k, verified, within, drawn: of the n visible tokens; 1 keeps every candidate. [0, 1]
  float mass = 0.95f;             ///< top_p, fitted, progressive: share of the softmax mass. (0, 1]
  std::uint32_t microbatch = 4;   ///< progressive: pages per iteration. [1, 1024]
  ProgressRule rule = ProgressRule::least;  ///< progressive
  /// verified: the sum of a head's softmax weights is off by more than this share of it with a probability of at most
  /// `delta` (vAttention, arXiv 2510.05688).
  float error = 0.1f;    ///< (0, 1)
  float delta = 0.1f;    ///< (0, 0.5]
  float sample = 0.02f;  ///< of the tokens that are not kept anyway, at least: by these the others are judged. (0, 1]
  /// within: each query head keeps its best tokens, as many as score less than this below a head's best, averaged over
  /// all heads of the layer; one at least, and min_tokens or `share` at most. 4: those that weigh more than 1.8% of the
  /// best. (0, 1000]
  float alpha = 4.f;
  std::uint32_t seed = 1;  ///< drawn: of the draws; the same seed draws the same tokens of the same sequence. [0, 2^32)
  /// drawn: a token's draw is a new one in every N-th step; 0: it never changes, so that what was drawn tends to be
  /// drawn again, and to be near. [0, 2^31)
  std::uint32_t redraw = 0;
  bool group_draws = false;  ///< drawn: the query heads of a KV head share one draw per token
  /// drawn: a query head whose error bar exceeds this share of its softmax sum draws twice as many tokens, and again,
  /// until the bar is at most so large, or `draw_most` tokens are drawn: see sample.hpp. 0: none does. [0, 1)
  float draw_error = 0.f;
  std::uint32_t draw_most = 0;  ///< drawn: 0: four times as many as are drawn at first. [min_tokens, 2^31) or 0
  friend bool operator==(const BudgetOptions&, const BudgetOptions&) = default;
};

/// Tokens of one layer, over all its KV heads, that a sequence's next token attends beyond sinks and recent tokens:
/// max(min_tokens, share * visible tokens * KV heads). Each query head keeps at most this many / query heads of a
/// layer, its best, before it is looked up which of them are near: what is selected depends on policy, shape and length
/// alone. Heads of a group that keep the same leave the rest of it unused. Layers that attend densely have no such
/// budget.
struct FarOptions {
  std::uint32_t min_tokens = 0;  ///< [0, 2^31)
  float share = 1.f;             ///< 1: all, and min_tokens is not read. [0, 1]
  [[nodiscard]] bool all() const noexcept { return share >= 1.f; }
  friend bool operator==(const FarOptions&, const FarOptions&) = default;
};

/// What lives near and is attended densely, selected or not.
struct NearOptions {
  std::uint32_t sink_tokens = 4;      ///< first tokens, always attended. [0, 4096]
  std::uint32_t recent_tokens = 128;  ///< newest tokens, always attended. [0, 1048576]
  /// Share of a sequence's pages that is attended densely beside them; an Engine refuses policies with one, unless they
  /// attend everything. 0: only sinks and recent tokens are attended, selected or not. [0, 1]
  float share = 0.f;
  friend bool operator==(const NearOptions&, const NearOptions&) = default;
};

/// When the estimate that a bypass rests on is not trusted, and no head is bypassed. LFPS has neither guard: infinity
/// leaves one out.
struct BypassGuards {
  /// Of the estimated variance of a head's logits, at most: beyond 6 a few keys hold most of the softmax, and the
  /// log-normal mean of all is off by factors. (0, infinity]
  float variance = 6.f;
  /// Generated tokens for each token of the prompt beyond its sinks, at most: mean and variance are the prompt's.
  /// [0, infinity]
  float growth = 1.f;
  friend bool operator==(const BypassGuards&, const BypassGuards&) = default;
};

/// A sparse-attention policy as a value: one choice per stage of the pipeline.
struct PolicySpec {
  std::string name;           ///< preset it came from
  std::uint16_t sources = 0;  ///< bits of Source; 0: near tokens only (StreamingLLM)
  HistoryOptions history;     ///< read if sources has `history`; local_tokens by a bypass, too
  PageSourceOptions pages;    ///< read if sources has `pages`
  ClusterOptions clusters;    ///< read if sources has `clusters`
  LshOptions lsh;             ///< read if sources has `lsh`
  SnapshotOptions snapshot;   ///< read if sources has `snapshot`
  LabelOptions labels;        ///< read if sources has `labels`
  Estimate estimate = Estimate::exact;
  float skewed_share = 0.2f;  ///< read if the estimate is `skewed`: of a key's channels, one at least. (0, 1]
  /// Tokens are chosen by the query that the attention input of the layer before gives with this layer's weights, which
  /// is known before the layer begins; attention itself is with the layer's own query. With `within`.
  bool rehearsed = false;
  BudgetOptions budget;       ///< read unless sources is 0 or has `all`
  FarOptions far;             ///< likewise
  NearOptions near;
  /// Heads whose sink mass exceeds this skip attending (LFPS section 4.3). 0: never. (0, 1]
  float bypass_threshold = 0.f;
  /// Only if the candidates' own scores leave the sinks that much, too: a head that rests on its sinks and has found
  /// what it wants attends it. Spares attention, not the search.
  bool bypass_checked = false;
  BypassGuards bypass_guards;  ///< read if there is a bypass
  /// Layers below this attend densely.
  std::uint32_t dense_layers = 0;
  /// Every N-th layer, the first included, attends densely; 0: none. [0, 1024]
  std::uint32_t dense_every = 0;
  /// Page size that the policy was made for; 0: any. An Engine has one page size for all its policies,
  /// EngineOptions::page_tokens, and does not read this.
  std::uint32_t page_tokens = 0;

  [[nodiscard]] bool dense(std::uint32_t layer) const noexcept {
    return layer < dense_layers || (dense_every != 0 && layer % dense_every == 0);
  }

  [[nodiscard]] bool uses(Source source) const noexcept { return (sources & static_cast<std::uint16_t>(source)) != 0; }
  friend bool operator==(const PolicySpec&, const PolicySpec&) = default;
};

/// Reads a policy:
///
///   policy  = (preset [":" options] | source {"+" source}) {"|" stage}
///   source  = ("all" | "exact" | "history" | "pages" | "clusters" | "lsh" | "snapshot" | "labels" | "scores"
///           | "none") [":" options]
///   stage   = "int4" | "int3" | "hadamard" | "skewed=" SHARE | "rehearsed" | "top_k=" COUNT
///           | "top_p=" SHARE | "fitted=" SHARE | "progressive=" SHARE ["," options] | "sampled"
///           | "verified=" SHARE ["," options] | "within=" LOGITS ["," options]
///           | "sample=" COUNT ["," options] | "far=" COUNT
///           | "bypass=" ("off" | ["sink:"] SHARE) ["," options]
///           | "near=" SHARE ["," options] | "dense=" LAYERS ["," options] | "page=" TOKENS
///   options = key "=" value {"," key "=" value}
///
/// as in `sluice`, `lfps:alpha=0.3,budget=2%`, `history+pages | top_p=0.95`, `pages:quest,budget=8192 | int4 |
/// top_p=0.9` and `twilight | near=10%`. A SHARE is 2% or 0.02; a COUNT is a number, a share, `all` or `max(64, 2%)`.
/// Blanks between words mean nothing. What is not said, or not read by what was said, has the defaults above.
/// @throws Error{Errc::invalid_argument} that points at the offending word and lists what exists, or that says why the
///     stages do not go together.
[[nodiscard]] PolicySpec parse_policy(std::string_view text);

/// Why the stages of a policy do not go together, each reason with what would; empty if they do.
[[nodiscard]] std::vector<std::string> unsupported_reasons(const PolicySpec& spec);

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range, or the first unsupported reason.
void validate(const PolicySpec& spec);

/// The composition, as parse_policy reads it: `history:share_group=on+pages | top_k=max(64, 2%) | near=10%`. Parsed, it
/// gives the same policy under another name.
[[nodiscard]] std::string to_string(const PolicySpec& spec);

struct PolicyPreset {
  PolicySpec spec;
  std::string summary;  ///< one line: what it does and where it comes from
};

/// All presets, in the order in which tables list them.
[[nodiscard]] const std::vector<PolicyPreset>& policy_presets();

}  // namespace sluice
