#include "scheduler/clusters/cluster_index.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "scheduler/policy/scored_set.hpp"

namespace sluice::scheduler {

void ClusterIndex::append(const Clustering& clustering) {
  const auto first = static_cast<std::uint32_t>(members_.size());
  const auto count = static_cast<std::uint32_t>(clustering.assignment.size());
  const auto clusters = static_cast<std::uint32_t>(clustering.centroids.size() / head_dim_);
  std::vector<std::uint32_t> ends(std::size_t{clusters} + 1, 0);
  for (const std::uint32_t cluster : clustering.assignment) ++ends[cluster + 1];
  // All memory first: an index that lacks some of it would be wrong.
  starts_.reserve(starts_.size() + clusters);
  centroids_.reserve(centroids_.size() + clustering.centroids.size());
  members_.reserve(std::size_t{first} + count);
  for (std::uint32_t cluster = 0; cluster < clusters; ++cluster) {
    const std::uint32_t size = ends[cluster + 1];
    ends[cluster + 1] += ends[cluster];
    if (size == 0) continue;
    starts_.push_back(starts_.back() + size);
    const auto centroid = clustering.centroids.subspan(std::size_t{cluster} * head_dim_, head_dim_);
    centroids_.insert(centroids_.end(), centroid.begin(), centroid.end());
  }
  members_.resize(std::size_t{first} + count);
  for (std::uint32_t i = 0; i < count; ++i) members_[first + ends[clustering.assignment[i]]++] = first + i;
}

void ClusterIndex::truncate(std::uint32_t tokens) noexcept {
  if (tokens >= members_.size()) return;
  const auto end = std::ranges::lower_bound(starts_, tokens);
  centroids_.resize(static_cast<std::size_t>(end - starts_.begin()) * head_dim_);
  starts_.erase(end + 1, starts_.end());
  members_.resize(tokens);
  // There may never be as many again.
  centroids_.shrink_to_fit();
  starts_.shrink_to_fit();
  members_.shrink_to_fit();
}

void ClusterRanking::rank(const float* scores, std::uint32_t count, std::uint32_t stride) {
  // A radix sort of 11 bits at a time: stable, and without comparisons, which would be mispredicted. A few thousand
  // clusters take less than a heap takes for the tenth of them that is needed.
  constexpr std::uint32_t kBits = 11;
  constexpr std::uint32_t kMask = (1u << kBits) - 1;
  constexpr std::uint32_t kDigits = 3;
  order_.resize(count);
  keys_.resize(count);
  next_order_.resize(count);
  next_keys_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  std::array<std::array<std::uint32_t, kMask + 1>, kDigits> begins{};
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t key = ~candidate_key(scores[std::size_t{i} * stride]);
    keys_[i] = key;
    for (std::uint32_t digit = 0; digit < kDigits; ++digit) ++begins[digit][(key >> (digit * kBits)) & kMask];
  }
  for (std::uint32_t digit = 0; digit < kDigits; ++digit) {
    auto& begin = begins[digit];
    std::exclusive_scan(begin.begin(), begin.end(), begin.begin(), 0u);
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t to = begin[(keys_[i] >> (digit * kBits)) & kMask]++;
      next_keys_[to] = keys_[i];
      next_order_[to] = order_[i];
    }
    keys_.swap(next_keys_);
    order_.swap(next_order_);
  }
}

}  // namespace sluice::scheduler
