#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/clusters/cluster_index.hpp"
#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// The clusters of one KV head and their order for each of its query heads (Tactic, arXiv 2502.12216, sections 4.2 and
/// 4.3). The prompt is clustered when decoding begins; newer tokens are in no cluster until there are
/// `recluster_every` of them, which then are clustered among themselves.
class ClusterSource {
 public:
  ClusterSource(const ClusterOptions& options, const AttentionShape& shape);

  void begin(const PromptContext& prompt);

  /// Tokens [0, clustered()) are in the index.
  [[nodiscard]] std::uint32_t clustered() const noexcept { return index_.tokens(); }
  /// Whether there are enough new tokens, of `tokens` in all.
  [[nodiscard]] bool due(std::uint32_t tokens) const noexcept {
    return tokens >= clustered() && tokens - clustered() >= options_.recluster_every;
  }
  /// Clusters the new tokens as long as there are enough.
  void cluster_new(std::uint32_t tokens, KvReader& kv);
  /// As if there had never been more than `tokens` tokens, of which the prompt has no more.
  void truncate(std::uint32_t tokens) noexcept;

  /// Ranks the clusters for the queries [group, head_dim].
  void rank(const float* q, KvReader& kv);
  [[nodiscard]] const ClusterIndex& index() const noexcept { return index_; }
  /// Bytes that ranking reads: every centroid once for the group.
  [[nodiscard]] std::uint64_t ranking_bytes() const noexcept { return index_.centroids().size() * sizeof(float); }
  /// Of query head `h`, as ranked last.
  [[nodiscard]] std::span<const std::uint32_t> order(std::uint32_t h) const noexcept { return rankings_[h].order(); }
  /// Adds the first `options.candidates` tokens of head `h` from position `sinks` on, and those in no cluster yet.
  void propose(std::uint32_t h, std::uint32_t sinks, std::uint32_t tokens, TokenSet& set) const;
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return index_.heap_bytes() + scheduler::heap_bytes(rankings_, scores_, centroids_, assignment_);
  }
  /// What a source that has seen `tokens` tokens holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const ClusterOptions& options, const AttentionShape& shape,
                                                     std::uint32_t tokens) noexcept;

 private:
  void append(const ClusterRequest& request, KvReader& kv);

  ClusterOptions options_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  std::uint32_t prompt_ = 0;  ///< tokens
  std::uint32_t first_ = 0;   ///< of these, that were clustered at once
  ClusterIndex index_;
  std::vector<ClusterRanking> rankings_;   ///< [group]
  std::vector<float> scores_;              ///< [clusters, group] scratch
  std::vector<float> centroids_;           ///< of the clustering in the making, else empty
  std::vector<std::uint32_t> assignment_;  ///< likewise
};

}  // namespace sluice::scheduler
