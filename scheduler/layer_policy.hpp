#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/undo.hpp"
#include "sluice/policy.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/selection.hpp"
#include "sluice/units.hpp"

namespace sluice::scheduler {

/// What one KV head attends near in this step, whatever the policy selects. A selection excludes it.
struct NearSet {
  std::uint32_t sink_end = 0;      ///< tokens [0, sink_end)
  std::uint32_t recent_begin = 0;  ///< tokens [recent_begin, n)
  std::uint32_t page_tokens = 32;

  [[nodiscard]] bool contains(std::uint32_t token) const noexcept { return token < sink_end || token >= recent_begin; }
};

/// K-means over the keys of tokens [first, first + count), as ClusterTask describes it.
struct ClusterRequest {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t clusters = 0;
  std::uint32_t iterations = 0;
  std::uint64_t seed = 0;
  friend bool operator==(const ClusterRequest&, const ClusterRequest&) = default;
};

/// What clustering makes, in memory that its maker owns.
struct Clustering {
  std::span<const float> centroids;           ///< [clusters, head_dim]
  std::span<const std::uint32_t> assignment;  ///< [count]
};

/// Reads keys and values of one (sequence, layer, KV head) in the host pool, where every token has a copy.
/// Valid during the call that it was passed to. Large calls share their work with other threads, and one that throws
/// Error{Errc::timeout} has left such a thread behind: what it was given to read or write must be a member of the
/// policy, or the calling thread's own scratch, not on the frame that is unwound.
class KvReader {
 public:
  virtual ~KvReader() = default;
  /// out[i, h] = the score of q[h].k[tokens[i]], see AttentionShape, for `q` [group, head_dim]; `tokens` ascending.
  virtual void score(const float* q, std::span<const std::uint32_t> tokens, float* out) = 0;
  /// The same, estimated from 4-bit copies of the keys where there are any: all but the newest page has one.
  virtual void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) { score(q, tokens, out); }
  /// Row of K or V as float32 [head_dim].
  virtual void key(std::uint32_t token, float* out) = 0;
  virtual void value(std::uint32_t token, float* out) = 0;
  /// Rows of K of tokens [first, first + count) as float32 [count, head_dim].
  virtual void keys(std::uint32_t first, std::uint32_t count, float* out) = 0;
  /// The clustering of some of the keys, by host threads. centroids [clusters, head_dim], assignment [count].
  virtual void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) = 0;
  /// out[i, j] = x[j].rows[i] / sqrt(d) for `rows` [count, d] and `x` [columns, d], columns in [1, 32]: the policy's
  /// own float32 rows, with the kernels that score keys.
  virtual void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count,
                          float* out) = 0;
  /// Calls work(i) for each i < `count`, once, perhaps on several threads at once: much work that is the policy's own.
  virtual void each(std::uint32_t count, const std::function<void(std::uint32_t)>& work) {
    for (std::uint32_t i = 0; i < count; ++i) work(i);
  }
};

/// The prompt of one KV head, when the first decode step begins.
struct PromptContext {
  std::uint32_t kv_head = 0;
  std::uint32_t tokens = 0;            ///< prompt length n
  std::uint32_t queries = 0;           ///< rows of last_q; row i is the query of position tokens - queries + i
  std::span<const float> last_q = {};  ///< [queries, group, head_dim]
  KvReader* kv = nullptr;
};

/// All KV heads of a layer in one decode step, for a policy whose heads choose together.
class LayerReader {
 public:
  virtual ~LayerReader() = default;
  /// Not 0, and no other step's; one that is repeated has another.
  [[nodiscard]] virtual std::uint64_t step() const noexcept = 0;
  /// [group, head_dim]
  [[nodiscard]] virtual const float* q(std::uint32_t kv_head) const noexcept = 0;
  /// Likewise, as HeadContext::rehearsed; null: there are none.
  [[nodiscard]] virtual const float* rehearsed(std::uint32_t kv_head) const noexcept = 0;
  /// As HeadContext::page_scores.
  [[nodiscard]] virtual std::span<const float> page_scores(std::uint32_t /*kv_head*/) const noexcept { return {}; }
  /// Valid until the next call.
  [[nodiscard]] virtual KvReader& kv(std::uint32_t kv_head) = 0;
};

/// One KV head in one decode step, its query known.
struct HeadContext {
  std::uint32_t kv_head = 0;
  std::uint32_t tokens = 0;  ///< n: visible tokens, the new one included (position n - 1)
  const float* q = nullptr;  ///< [group, head_dim]
  /// Likewise, what the input of the layer before gives with this layer's query weights; null: nobody has said.
  const float* rehearsed = nullptr;
  /// Queries of the next positions, whose tokens are there: rows that are going to attend what this one selects.
  /// [rows, group, head_dim]
  std::span<const float> behind = {};
  /// Pages that rank highest by digest for each query head, ascending; [group, ranked_pages]. Empty unless
  /// the policy's sources have `pages`, or if it `ranks_itself`. Only full pages are ranked.
  std::span<const std::uint32_t> ranked_pages = {};
  /// Digest scores of all full pages, raw; [group, pages]. Empty unless the policy `ranks_itself`.
  std::span<const float> page_scores = {};
  const NearSet* near = nullptr;
  KvReader* kv = nullptr;
  LayerReader* layer = nullptr;  ///< null: of a layer with one KV head
};

/// What a selection cost and found, for one KV head.
struct SelectCounters {
  std::uint64_t candidates = 0;         ///< after the union over the group
  std::uint64_t expanded_per_head = 0;  ///< before it, summed over query heads
  std::uint64_t scored = 0;             ///< K rows read
  std::uint64_t estimated = 0;          ///< 4-bit copies of K rows read
  std::uint64_t index_bytes = 0;        ///< side data read to find candidates: centroids, hash tables' lists
  std::uint64_t near_hits = 0;          ///< candidates that were near
  std::uint64_t iterations = 0;         ///< microbatches of pages that a progressive budget took
};

/// Candidates of a KV head's query heads, bit per token.
struct ProposedTokens {
  std::span<std::uint64_t> words;  ///< [group, head_words]
  std::size_t head_words = 0;
  bool shared = false;  ///< those of the first query head are those of all, and only these are written
};

/// The state and decisions of one policy for one (sequence, layer). Pure: no clock, no thread, no device.
///
/// Life of one step, per KV head: forecast(n) -> select(n) -> observe(). `forecast` needs no query and runs
/// in the background of the step before; it and `observe` are left out unless the policy wants them. A step that fails
/// after `select` is repeated from `select`; `observe` is called once, for the last `select`.
/// Thread safety: different KV heads may be driven by different threads at once, but not during `clone`.
class LayerPolicy {
 public:
  virtual ~LayerPolicy() = default;
  /// Builds side data from the prompt. Called once per KV head, also for an empty prompt.
  virtual void begin(const PromptContext& prompt) = 0;
  /// Finds candidates for the step in which `tokens` tokens will be visible, if any follow from what was learnt.
  virtual void forecast(std::uint32_t /*kv_head*/, std::uint32_t /*tokens*/) {}
  /// What `select` of the step in which `tokens` tokens will be visible is going to choose from, by 4-bit copies of
  /// keys alone, if that is known without a query (true). Then `select` and `observe` may come when the step is over,
  /// and only if `wants_observation`. If it is not, `select` must find out.
  virtual bool propose(std::uint32_t /*kv_head*/, std::uint32_t /*tokens*/, ProposedTokens& /*to*/) { return false; }
  /// Fills `row` (cleared by the caller) with what to attend beyond the near set.
  virtual void select(const HeadContext& head, SelectionRow& row, Bypass& bypass, SelectCounters& counters) = 0;
  /// Whether the last selection of a KV head is to be observed, and its next step forecast, at all.
  [[nodiscard]] virtual bool wants_observation(std::uint32_t /*kv_head*/) const noexcept { return false; }
  /// Feeds the weights of the last selection back; `kv` as in that selection.
  virtual void observe(std::uint32_t kv_head, KvReader& kv) = 0;

  /// Another one that goes on as this one would, on its own. Copies what is kept of all KV heads: as many bytes as
  /// heap_bytes says, but for hash tables, which are shared.
  [[nodiscard]] virtual std::unique_ptr<LayerPolicy> clone() const = 0;
  /// Whether `truncate` can take back all steps with more than `tokens` visible tokens, of which the prompt has no
  /// more. Those of the newest kUndoTokens tokens always, if in each of them every query head observed no more than
  /// max(64, 2%) of the tokens, as policies with that budget do (lfps), and history.decay is 0.85 or more; fewer, where
  /// heads observe more. All of them, if the policy has no history.
  [[nodiscard]] virtual bool can_truncate(std::uint32_t /*kv_head*/, std::uint32_t /*tokens*/) const noexcept {
    return true;
  }
  /// From now on as if those steps had never been, whether they were observed or not: the next is `select` with tokens
  /// + 1 visible tokens, without a forecast. Where `can_truncate` says so. Costs about what observing them has cost.
  virtual void truncate(std::uint32_t /*kv_head*/, std::uint32_t /*tokens*/) noexcept {}
  /// Of the heap, that it holds for a KV head between steps: no more than `policy_state_bytes` says. Policies that keep
  /// nothing say 0.
  [[nodiscard]] virtual std::uint64_t heap_bytes(std::uint32_t /*kv_head*/) const noexcept { return 0; }
};

/// Whether a policy ranks pages by itself, from their scores.
[[nodiscard]] bool ranks_itself(const PolicySpec& spec) noexcept;

/// @throws Error{Errc::invalid_argument} if the spec breaks its ranges.
[[nodiscard]] std::unique_ptr<LayerPolicy> make_layer_policy(const PolicySpec& spec, const AttentionShape& shape,
                                                             std::uint32_t page_tokens, LayerId layer);

/// What the policies of a sequence of `tokens` tokens keep on the heap at most, between steps, in all layers and KV
/// heads: LayerPolicy::heap_bytes together, also after steps were taken back. At 65,536 tokens, in percent of keys and
/// values in bf16 with head_dim 128 and 4 query heads per KV head: 7.3 for history (lfps), 2.7 of which are what its
/// newest tokens have changed, 5.0 for clusters (tactic), 121 for hash tables (magicpig), 6.6 for labels, codes.
/// `windows`: see EngineOptions; layers that have one keep nothing.
[[nodiscard]] std::uint64_t policy_state_bytes(const PolicySpec& spec, const AttentionShape& shape,
                                               std::uint32_t tokens,
                                               std::span<const std::uint32_t> windows = {}) noexcept;

/// What budgets of a layer follow from beside a policy and a length.
struct RowShape {
  std::uint32_t page_tokens = 16;
  std::uint32_t q_heads = 1;
  std::uint32_t kv_heads = 1;
  std::uint32_t dense_tokens = 0;  ///< as in EngineOptions, resolved
  [[nodiscard]] constexpr std::uint32_t group() const noexcept { return q_heads / kv_heads; }
};
[[nodiscard]] constexpr RowShape row_shape(const AttentionShape& shape, std::uint32_t page_tokens) noexcept {
  return {.page_tokens = page_tokens, .q_heads = shape.q_heads, .kv_heads = shape.kv_heads};
}

/// Tokens that each query head may keep of n visible ones: max(min_tokens, share * n), at most n.
[[nodiscard]] std::uint32_t budget_tokens(const BudgetOptions& budget, std::uint32_t n) noexcept;
/// Tokens that each query head may choose by labels of n visible ones, likewise.
[[nodiscard]] std::uint32_t budget_tokens(const LabelOptions& options, std::uint32_t n) noexcept;
/// Pages that each query head may rank of `pages` full ones.
[[nodiscard]] std::uint32_t budget_pages(const PageSourceOptions& options, std::uint32_t pages,
                                         std::uint32_t page_tokens) noexcept;
/// Far tokens of a layer that may be attended of n visible ones: what FarOptions say.
[[nodiscard]] std::uint64_t far_tokens(const FarOptions& far, std::uint32_t n, const RowShape& shape) noexcept;
/// Far tokens that each query head may keep of n visible ones: an even part of the layer's, at most n; n if there is no
/// such budget.
[[nodiscard]] std::uint32_t far_tokens_per_head(const FarOptions& far, std::uint32_t n, const RowShape& shape) noexcept;
/// The smaller of both.
[[nodiscard]] std::uint32_t tokens_per_head(const PolicySpec& spec, std::uint32_t n, const RowShape& shape) noexcept;
/// And at most, where a head draws more if its error bar is large.
[[nodiscard]] std::uint32_t most_tokens_per_head(const PolicySpec& spec, std::uint32_t n,
                                                 const RowShape& shape) noexcept;

}  // namespace sluice::scheduler
