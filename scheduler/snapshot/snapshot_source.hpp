#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// Tokens beside the window that a KV head of a layer keeps on the average, of the `prefix` tokens before it:
/// PyramidKV's arithmetic sequence over the layers, from 2 - 1 / pyramid times the mean down to 1 / pyramid of it,
/// rounded to nearest. Where the first layer would keep more than there is, it keeps all, and the last one as much
/// more.
[[nodiscard]] std::uint32_t snapshot_budget(const SnapshotOptions& options, std::uint32_t layer, std::uint32_t layers,
                                            std::uint32_t prefix) noexcept;

/// A budget that the KV heads of a layer share (Ada-KV, algorithm 1): each has `floor` of its part for itself, and of
/// the rest as much as the share of its scores among the layer's highest, as many of which are taken as the layer
/// keeps. Ties go to the lower head. Thread safety: any.
class SharedBudget {
 public:
  explicit SharedBudget(std::uint32_t kv_heads) : scores_(kv_heads) {}

  /// Of each head once, before any head asks for its tokens.
  /// @param highest  scores of the head, the highest first; as many as the layer keeps, or all that there are
  void offer(std::uint32_t kv_head, std::shared_ptr<const std::vector<float>> highest);
  /// What `kv_head` may keep.  @param tokens  that each head keeps on the average
  [[nodiscard]] std::uint32_t tokens(std::uint32_t kv_head, std::uint32_t tokens, float floor);

 private:
  void count(std::uint64_t all);

  std::mutex mutex_;
  std::vector<std::shared_ptr<const std::vector<float>>> scores_;  ///< [kv_heads]
  std::vector<std::uint32_t> counts_;  ///< [kv_heads], of the layer's highest; empty: not yet
};

/// What one KV head keeps of its prompt: see SnapshotOptions. Scores are those of SnapKV (arXiv 2404.14469, section 4)
/// as kvpress has them for groups: each query head's softmax weights, summed over the window's queries, are pooled over
/// positions, then averaged over the group. Ties go to the earlier token.
/// A prompt whose queries are not known, as one that was imported, is kept whole.
class SnapshotSource {
 public:
  /// @param shared  of all heads of the layer
  SnapshotSource(const SnapshotOptions& options, const AttentionShape& shape, LayerId layer,
                 std::shared_ptr<SharedBudget> shared);

  void begin(const PromptContext& prompt);
  /// Finds out how much of it is kept, once all heads of the layer have begun. Before `propose`.
  void settle();
  /// Adds what is kept from position `sinks` on, and all tokens behind the prompt's prefix.
  void propose(std::uint32_t sinks, std::uint32_t tokens, TokenSet& set) const;

  /// Of the prefix, ascending once settled.
  [[nodiscard]] std::span<const std::uint32_t> kept() const noexcept { return kept_; }
  /// Tokens from here on are all kept.
  [[nodiscard]] std::uint32_t prefix() const noexcept { return prefix_; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(kept_) + (scores_ ? kScoresBytes + scheduler::heap_bytes(*scores_) : 0);
  }
  /// What a source of a prompt of `tokens` tokens holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const SnapshotOptions& options, const AttentionShape& shape,
                                                     std::uint32_t tokens) noexcept;

 private:
  /// Of a shared vector, beside what it holds.
  static constexpr std::uint64_t kScoresBytes = sizeof(std::vector<float>) + 4 * sizeof(void*);

  [[nodiscard]] std::vector<float> scores(const PromptContext& prompt) const;

  SnapshotOptions options_;
  std::uint32_t group_;
  std::uint32_t layers_;
  std::uint32_t kv_heads_;
  std::uint32_t layer_;
  std::uint32_t kv_head_ = 0;
  std::uint32_t prefix_ = 0;  ///< tokens before those that are all kept; 0: nothing was evicted
  std::uint32_t budget_ = 0;  ///< of the prefix, on the average over the layer's heads
  std::shared_ptr<SharedBudget> shared_;
  std::vector<std::uint32_t> kept_;                   ///< until settled the best first, as many as might be kept
  std::shared_ptr<const std::vector<float>> scores_;  ///< what was offered; null once settled
};

}  // namespace sluice::scheduler
