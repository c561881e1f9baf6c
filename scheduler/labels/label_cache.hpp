#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// Newest queries of a prompt that channels are chosen by.
inline constexpr std::uint32_t kLabelQueries = 32;

/// Who is to rank what by labels.
struct LabelQuery {
  const float* q = nullptr;  ///< [group, head_dim]
  std::uint32_t begin = 0;   ///< tokens [begin, end) are ranked
  std::uint32_t end = 0;
  std::uint32_t most = 0;   ///< tokens that each query head chooses
  std::uint32_t heads = 0;  ///< bit h: query head h takes part
};

/// A few channels of every key of one KV head, side by side in bf16, by which keys are ranked (Double Sparsity,
/// arXiv 2408.07092). The paper calls them labels. Its channels are those whose products |q * k| are largest on the
/// average over a calibration set, found once per model; here the same average is taken over all pairs of the prompt's
/// newest queries, of all heads of the group, with its keys. Ties go to the lower channel. Without a prompt there is
/// nothing to choose by, and keys are scored whole.
class LabelCache {
 public:
  /// @param channels  of a label; all of a key's, if these are fewer
  LabelCache(std::uint32_t channels, const AttentionShape& shape);

  void begin(const PromptContext& prompt);
  /// Labels the tokens before `tokens` that have none, and the newest in any case: that of a forward which failed may
  /// have been another one.
  void follow(std::uint32_t tokens, KvReader& kv);
  /// As if there had never been more than `tokens` tokens.
  void truncate(std::uint32_t tokens) noexcept;

  /// Adds each head's best tokens by q.k over the label's channels to its set: to sets[h], or to the only one there is.
  /// Ties go to the earlier token; NaN comes last. The ranked tokens have labels.
  void propose(const LabelQuery& query, KvReader& kv, std::span<TokenSet> sets, SelectCounters& counters) const;
  /// out[i, h] = q[h].k[begin + i] over the label's channels: what tokens [begin, end), which have labels, are ranked
  /// by. Neither scale nor soft-cap would change an order.
  void score(const float* q, std::uint32_t begin, std::uint32_t end, float* out) const;

  /// Ascending; empty without a prompt.
  [[nodiscard]] std::span<const std::uint32_t> channels() const noexcept { return channels_; }
  [[nodiscard]] std::uint32_t labelled() const noexcept {
    return channels_.empty() ? 0 : static_cast<std::uint32_t>(labels_.size() / channels_.size());
  }
  /// Of one token.
  [[nodiscard]] std::uint64_t bytes_per_token() const noexcept { return channels_.size() * sizeof(std::uint16_t); }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(channels_, labels_); }
  /// What a cache with labels of `tokens` tokens holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint32_t channels, const AttentionShape& shape,
                                                     std::uint32_t tokens) noexcept;

 private:
  void choose_channels(const PromptContext& prompt);
  void score_all(const LabelQuery& query, KvReader& kv) const;

  std::uint32_t wanted_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  std::vector<std::uint32_t> channels_;  ///< ascending
  std::vector<std::uint16_t> labels_;    ///< bf16, [tokens, channels]
};

}  // namespace sluice::scheduler
