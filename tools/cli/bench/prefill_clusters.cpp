#include "tools/cli/bench/prefill_clusters.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "sluice/error.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

/// Of a mean of keys in 16 bits, relative to its length.
constexpr double kTolerance = 1e-3;

void check(bool right, const std::string& what) {
  if (!right)
    throw Error(Errc::device, "bench prefill: k-means of a prompt's keys is wrong: " + what + "; it was not timed");
}

}  // namespace

PrefillClusters::PrefillClusters(const std::vector<std::unique_ptr<PrefillLayer>>& layers,
                                 std::uint32_t tokens_per_cluster, Device& device, Stream& stream)
    : layers_(layers), device_(device), stages_(stages_of(device)), stream_(stream) {
  const auto made = [&](std::uint64_t bytes) {
    memory_.push_back(device_.allocate(std::max<std::uint64_t>(bytes, 1)));
    return memory_.back()->data();
  };
  for (const auto& layer : layers_) {
    const PrefillLayerOptions& options = layer->options();
    const std::uint32_t clusters = std::max(options.tokens / tokens_per_cluster, 1u);
    most_ = std::max(most_, clusters);
    for (std::uint32_t head = 0; head < options.shape.kv_heads; ++head) {
      ClusterTask task{.kv = layer->view(head),
                       .count = options.tokens,
                       .clusters = clusters,
                       .iterations = ClusterOptions{}.iterations};
      task.centroids = reinterpret_cast<float*>(made(std::uint64_t{clusters} * options.shape.head_dim * sizeof(float)));
      task.members = reinterpret_cast<std::uint32_t*>(made(options.tokens * sizeof(std::uint32_t)));
      task.starts = reinterpret_cast<std::uint32_t*>(made((clusters + 1) * sizeof(std::uint32_t)));
      task.scratch = made(stages_->cluster_scratch_bytes(task));
      tasks_.push_back(task);
    }
  }
}

void PrefillClusters::cluster() { stages_->cluster(tasks_, &stream_); }

void PrefillClusters::require() const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::size_t heads = layers_[i]->options().shape.kv_heads;
    require(tasks_[i * heads], *layers_[i]);
    require(tasks_[(i + 1) * heads - 1], *layers_[i]);
  }
}

void PrefillClusters::require(const ClusterTask& task, const PrefillLayer& layer) const {
  const PageLayout& layout = layer.options().layout;
  const auto fetched = [&]<class T>(const T* from, std::size_t count) {
    return downloaded<T>(device_, stream_, reinterpret_cast<const std::byte*>(from), count);
  };
  const auto centroids = fetched(task.centroids, std::size_t{task.clusters} * layout.head_dim);
  const auto members = fetched(task.members, task.count);
  const auto starts = fetched(task.starts, task.clusters + 1);
  const auto pages = downloaded<std::byte>(device_, stream_, task.kv.page(0), layer.head_bytes());
  std::vector<bool> seen(task.count);
  for (const std::uint32_t token : members) {
    check(token < task.count && !seen[token], "token " + std::to_string(token) + " is twice in a cluster");
    seen[token] = true;
  }
  check(starts.front() == 0 && starts.back() == task.count, "clusters do not hold all tokens");
  std::vector<float> key(layout.head_dim);
  for (std::uint32_t c = 0; c < task.clusters; ++c) {
    check(starts[c] <= starts[c + 1], "cluster " + std::to_string(c) + " ends before it begins");
    if (starts[c] == starts[c + 1]) continue;  // Stays at a key.
    std::vector<double> mean(layout.head_dim);
    for (std::uint32_t i = starts[c]; i < starts[c + 1]; ++i) {
      const std::uint32_t token = members[i];
      widen(layout.dtype,
            pages.data() + token / layout.page_tokens * layout.page_bytes() +
                token % layout.page_tokens * layout.row_bytes(),
            key);
      for (std::size_t e = 0; e < mean.size(); ++e) mean[e] += key[e];
    }
    double off = 0.0, length = 0.0;
    for (std::size_t e = 0; e < mean.size(); ++e) {
      mean[e] /= starts[c + 1] - starts[c];
      off += std::pow(mean[e] - centroids[std::size_t{c} * layout.head_dim + e], 2);
      length += mean[e] * mean[e];
    }
    check(std::sqrt(off) <= kTolerance * std::sqrt(length) + 1e-6,
          "centroid " + std::to_string(c) + " is not the mean of its keys");
  }
}

}  // namespace sluice::tools
