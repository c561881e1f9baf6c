#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/policy.hpp"
#include "sluice/step/select_tasks.hpp"
#include "tools/cli/bench/prefill_layer.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {

/// K-means of the keys of prompts, one layer of all KV heads, as `tactic | int4` does when a prompt's first token is
/// decoded. Must stay until the stream has passed what was enqueued.
class PrefillClusters {
 public:
  /// The layers, of one shape, must outlive it.
  /// @throws Error{Errc::out_of_capacity} if the device cannot hold what they need.
  PrefillClusters(const std::vector<std::unique_ptr<PrefillLayer>>& layers, std::uint32_t tokens_per_cluster,
                  Device& device, Stream& stream);

  /// Enqueues all of them, as one call.
  void cluster();
  /// Waits. Makes sure that every token is in one cluster, and that centroids are the means of their keys, in float64.
  /// Of each layer's first and last KV head.
  /// @throws Error{Errc::device} saying which are not.
  void require() const;
  /// Of a KV head of the longest prompt.
  [[nodiscard]] std::uint32_t clusters() const noexcept { return most_; }

 private:
  void require(const ClusterTask& task, const PrefillLayer& layer) const;

  const std::vector<std::unique_ptr<PrefillLayer>>& layers_;
  Device& device_;
  std::shared_ptr<Stages> stages_;
  Stream& stream_;
  std::uint32_t most_ = 0;
  std::vector<ClusterTask> tasks_;  ///< [layers, kv_heads]
  std::vector<std::unique_ptr<Buffer>> memory_;
};

}  // namespace sluice::tools
