#include "scheduler/clusters/cluster_source.hpp"

#include <algorithm>

#include "scheduler/clusters/cluster_schedule.hpp"

namespace sluice::scheduler {
namespace {

/// The seed is the block's position, so that blocks differ and runs do not.
ClusterRequest request_for(const ClusterOptions& options, std::uint32_t first, std::uint32_t count) noexcept {
  return {.first = first,
          .count = count,
          .clusters = std::max(count / options.tokens_per_cluster, 1u),
          .iterations = options.iterations,
          .seed = first};
}

}  // namespace

ClusterSource::ClusterSource(const ClusterOptions& options, const AttentionShape& shape)
    : options_(options),
      group_(shape.group()),
      head_dim_(shape.head_dim),
      index_(shape.head_dim),
      rankings_(shape.group()) {}

void ClusterSource::begin(const PromptContext& prompt) {
  prompt_ = prompt.tokens;
  if (prompt.tokens == 0 || prompt.tokens < options_.min_tokens) return;
  append(request_for(options_, 0, prompt.tokens), *prompt.kv);
  first_ = prompt.tokens;
}

void ClusterSource::truncate(std::uint32_t tokens) noexcept {
  const std::uint32_t every = options_.recluster_every;
  // A prompt that is too short to be clustered is once its first token is decoded, if as many new tokens would be.
  const std::uint32_t left = tokens > prompt_ ? first_ + (tokens - first_) / every * every : first_;
  if (left >= clustered()) return;
  index_.truncate(left);
  for (ClusterRanking& ranking : rankings_) ranking = ClusterRanking();
  scores_ = std::vector<float>();
}

void ClusterSource::cluster_new(std::uint32_t tokens, KvReader& kv) {
  while (due(tokens)) append(request_for(options_, clustered(), options_.recluster_every), kv);
}

void ClusterSource::append(const ClusterRequest& request, KvReader& kv) {
  centroids_.resize(std::size_t{request.clusters} * head_dim_);
  assignment_.resize(request.count);
  kv.cluster(request, centroids_.data(), assignment_.data());
  index_.append({.centroids = centroids_, .assignment = assignment_});
  centroids_ = std::vector<float>();
  assignment_ = std::vector<std::uint32_t>();
}

void ClusterSource::rank(const float* q, KvReader& kv) {
  scores_.resize(std::size_t{index_.size()} * group_);
  if (!scores_.empty()) kv.score_rows(q, group_, index_.centroids().data(), index_.size(), scores_.data());
  for (std::uint32_t h = 0; h < group_; ++h) rankings_[h].rank(scores_.data() + h, index_.size(), group_);
}

std::uint64_t ClusterSource::most_heap_bytes(const ClusterOptions& options, const AttentionShape& shape,
                                             std::uint32_t tokens) noexcept {
  const std::uint64_t clusters = ClusterSchedule::most_clusters(options, tokens);
  const std::uint64_t index =
      (clusters + 2 + tokens) * sizeof(std::uint32_t) + clusters * shape.head_dim * sizeof(float);
  // The rankings' vectors grow as vectors do, to twice of what they need.
  const std::uint64_t ranking = sizeof(ClusterRanking) + 2 * 4 * clusters * sizeof(std::uint32_t);
  return index + shape.group() * (ranking + 2 * clusters * sizeof(float));
}

void ClusterSource::propose(std::uint32_t h, std::uint32_t sinks, std::uint32_t tokens, TokenSet& set) const {
  for_each_in_order(index_, order(h), 0, options_.candidates, [&](std::uint32_t token, std::uint32_t) {
    if (token >= sinks) set.add(token);
  });
  set.add_range(std::max(clustered(), sinks), tokens);
}

}  // namespace sluice::scheduler
