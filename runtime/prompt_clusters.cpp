#include "runtime/prompt_clusters.hpp"

#include "runtime/host_kv.hpp"
#include "sluice/backend.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

/// The old buffer goes first: there may be no room for both.
template <class Allocate>
void grow(std::unique_ptr<Buffer>& buffer, std::uint64_t bytes, const Allocate& allocate) {
  if (bytes == 0 || (buffer != nullptr && buffer->bytes() >= bytes)) return;
  buffer.reset();
  buffer = allocate(bytes);
}

}  // namespace

std::span<const scheduler::Clustering> PromptClusters::make(const scheduler::ClusterRequest& request,
                                                            std::span<const HeadPages> heads, Stream& stream,
                                                            Deadline deadline) {
  const std::uint64_t floats = std::uint64_t{request.clusters} * pool_.layout().head_dim;
  tasks_.clear();
  for (const HeadPages& head : heads) {
    tasks_.push_back({.kv = far_view(pool_, head),
                      .first = request.first,
                      .count = request.count,
                      .clusters = request.clusters,
                      .iterations = request.iterations,
                      .seed = request.seed});
  }
  reserve(tasks_.front(), heads.size());

  auto* const centroids = reinterpret_cast<float*>(results_->data());
  auto* const assignments = reinterpret_cast<std::uint32_t*>(centroids + heads.size() * floats);
  clusterings_.clear();
  for (std::size_t head = 0; head < heads.size(); ++head) {
    ClusterTask& task = tasks_[head];
    task.centroids = centroids + head * floats;
    task.assignment = assignments + head * request.count;
    task.scratch = scratch_ == nullptr ? nullptr : scratch_->data();
    clusterings_.push_back({.centroids = {task.centroids, floats}, .assignment = {task.assignment, request.count}});
  }
  try {
    // One after the other: a long prompt's head fills the device, and they share the scratch memory.
    for (const ClusterTask& task : tasks_) device_.backend().cluster({&task, 1}, &stream);
  } catch (...) {
    finish(stream, deadline);  // The heads before refer to what the next call changes.
    throw;
  }
  if (const std::string failure = finish(stream, deadline); !failure.empty()) {
    throw Error(Errc::device, "clustering of a prompt failed: " + failure + "; the step may be repeated");
  }
  return clusterings_;
}

std::string PromptClusters::finish(Stream& stream, Deadline deadline) {
  stream.record(*done_);  // Takes what failed, so that another attempt starts clean.
  stream.synchronize(deadline);
  return done_->reason();
}

void PromptClusters::reserve(const ClusterTask& task, std::size_t heads) {
  grow(scratch_, device_.backend().cluster_scratch_bytes(task),
       [this](std::uint64_t bytes) { return device_.allocate(bytes); });
  const std::uint64_t per_head = std::uint64_t{task.clusters} * pool_.layout().head_dim * sizeof(float) +
                                 std::uint64_t{task.count} * sizeof(std::uint32_t);
  grow(results_, heads * per_head, [this](std::uint64_t bytes) { return device_.allocate_pinned(bytes); });
}

}  // namespace sluice::runtime
