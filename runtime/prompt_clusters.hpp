#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/host_pool.hpp"
#include "runtime/page_table.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/device.hpp"

namespace sluice::runtime {

/// Has a device cluster the keys of a prompt, which it reads where they are, in the host pool: k-means costs
/// tokens * clusters products per iteration, what a GPU is for. Its memory, about 1.3 times one KV head's keys on the
/// device, is made when first needed and kept for the next layers and sequences.
class PromptClusters {
 public:
  PromptClusters(Device& device, const cpu::HostPool& pool)
      : device_(device), pool_(pool), done_(device.create_event()) {}

  /// One clustering per KV head, when they are done. Valid until the next call.
  /// @throws Error{Errc::out_of_capacity} without room on the device, and whatever the stream fails with.
  [[nodiscard]] std::span<const scheduler::Clustering> make(const scheduler::ClusterRequest& request,
                                                            std::span<const HeadPages> heads, Stream& stream,
                                                            Deadline deadline);

 private:
  void reserve(const ClusterTask& task, std::size_t heads);
  /// Waits for everything queued; says why it failed if it did.
  std::string finish(Stream& stream, Deadline deadline);

  Device& device_;
  const cpu::HostPool& pool_;
  std::unique_ptr<Event> done_;
  std::vector<ClusterTask> tasks_;
  std::vector<scheduler::Clustering> clusterings_;
  std::unique_ptr<Buffer> scratch_;  ///< device, of one task at a time
  std::unique_ptr<Buffer> results_;  ///< pinned: centroids of all heads, then assignments of all heads
};

}  // namespace sluice::runtime
