#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

/// Clusters of one KV head's tokens [0, tokens()), each token in exactly one. Empty clusters are left out; tokens of a
/// cluster are in the order of their positions.
class ClusterIndex {
 public:
  explicit ClusterIndex(std::uint32_t head_dim) : head_dim_(head_dim) {}

  /// Adds the next `clustering.assignment.size()` tokens as clusters of their own.
  void append(const Clustering& clustering);
  /// Takes the newest clusterings back, until there are `tokens`: as many as there were before one of them.
  void truncate(std::uint32_t tokens) noexcept;

  [[nodiscard]] std::uint32_t tokens() const noexcept { return static_cast<std::uint32_t>(members_.size()); }
  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(starts_.size() - 1); }
  [[nodiscard]] std::span<const std::uint32_t> members(std::uint32_t cluster) const noexcept {
    return std::span(members_).subspan(starts_[cluster], starts_[cluster + 1] - starts_[cluster]);
  }
  /// [size(), head_dim]
  [[nodiscard]] std::span<const float> centroids() const noexcept { return centroids_; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(starts_, members_, centroids_);
  }

 private:
  std::uint32_t head_dim_;
  std::vector<std::uint32_t> starts_{0};  ///< [size() + 1] into members_
  std::vector<std::uint32_t> members_;
  std::vector<float> centroids_;
};

/// Clusters by descending score, of `scores` every `stride`-th; equal ones by index, NaN last.
class ClusterRanking {
 public:
  void rank(const float* scores, std::uint32_t count, std::uint32_t stride);
  [[nodiscard]] std::span<const std::uint32_t> order() const noexcept { return order_; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(order_, keys_, next_order_, next_keys_);
  }

 private:
  std::vector<std::uint32_t> order_, keys_;
  std::vector<std::uint32_t> next_order_, next_keys_;  // scratch
};

/// Calls visit(token, i) for the tokens x_i of [begin, end) of the order that lists the clusters' tokens one cluster
/// after the other; i counts from 0.
template <class Visit>
void for_each_in_order(const ClusterIndex& index, std::span<const std::uint32_t> order, std::uint32_t begin,
                       std::uint32_t end, Visit&& visit) {
  std::uint32_t at = 0;
  for (std::size_t i = 0; i < order.size() && at < end; ++i) {
    const std::span<const std::uint32_t> members = index.members(order[i]);
    const auto size = static_cast<std::uint32_t>(members.size());
    const std::uint32_t last = size < end - at ? size : end - at;
    for (std::uint32_t m = at < begin ? begin - at : 0; m < last; ++m) visit(members[m], at + m);
    at += size;
  }
}

}  // namespace sluice::scheduler
