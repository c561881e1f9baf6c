#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "gpu/device/handles.hpp"

namespace sluice::gpu {

/// Collects the kernels that are enqueued on one stream and submits them as one CUDA graph. Kernels only: an event
/// recorded meanwhile would be a part of the graph and nothing that anyone can ask for, so whoever records ends the
/// batch before.
///
/// Executable graphs are kept by the number of their kernels. As batches are chains, one of the same length takes the
/// new kernels and arguments by an update; launches that are under way keep the old ones.
/// Thread safety: the stream's, and a batch is ended by the thread that began it.
class GraphBatch {
 public:
  explicit GraphBatch(cudaStream_t stream) noexcept : stream_(stream) {}
  GraphBatch(const GraphBatch&) = delete;
  GraphBatch& operator=(const GraphBatch&) = delete;

  [[nodiscard]] bool open() const noexcept { return open_; }
  /// Where CUDA refuses, or has refused updates too often, no batch is opened and kernels go one by one.
  void begin() noexcept;
  /// Submits; nothing without an open batch.  @throws Error{Errc::device} if none of the batch will happen.
  void end();
  /// Ends without submitting.
  void drop() noexcept;
  /// Frees what could not be freed while the stream might still run it: it is idle.
  void tidy() noexcept { retired_.clear(); }

 private:
  [[nodiscard]] cudaGraphExec_t executable(cudaGraph_t graph, std::size_t kernels);

  cudaStream_t stream_;
  bool open_ = false;
  std::vector<ExecutableHandle> by_kernels_;  ///< null where no batch had as many
  std::vector<ExecutableHandle> retired_;     ///< that an update was refused for
};

}  // namespace sluice::gpu
