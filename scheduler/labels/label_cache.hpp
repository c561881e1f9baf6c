#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// Newest queries of a prompt that channels are chosen by.
inline constexpr std::uint32_t kLabelQueries = 32;

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

  /// out[i, h] = q[h].k[tokens[i]] over the label's channels, scaled as scores are but without a soft-cap, which
  /// changes no order; `tokens` have labels.
  void estimate(const float* q, std::span<const std::uint32_t> tokens, KvReader& kv, float* out) const;

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

  std::uint32_t wanted_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  float scale_;                          ///< AttentionShape::score_scale
  std::vector<std::uint32_t> channels_;  ///< ascending
  std::vector<std::uint16_t> labels_;    ///< bf16, [tokens, channels]
};

}  // namespace sluice::scheduler
