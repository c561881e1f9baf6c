#include "gpu/device/graph_batch.hpp"

#include <utility>

#include "gpu/device/cuda_error.hpp"

namespace sluice::gpu {
namespace {

/// Updates are refused for reasons that do not come and go; as many say that batches do not suit this stream.
constexpr std::size_t kMostRetired = 16;

}  // namespace

void GraphBatch::begin() noexcept {
  if (open_ || retired_.size() >= kMostRetired) return;
  // What other threads do to the device meanwhile is none of this stream's business.
  open_ = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
  if (!open_) (void)cudaGetLastError();
}

void GraphBatch::end() {
  if (!open_) return;
  open_ = false;
  cudaGraph_t captured = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream_, &captured);
  const GraphHandle graph(captured);
  check(status, "collect a batch of kernels");
  std::size_t kernels = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &kernels), "count the kernels of a batch");
  if (kernels == 0) return;
  check(cudaGraphLaunch(executable(graph.get(), kernels), stream_), "launch a batch of kernels");
}

void GraphBatch::drop() noexcept {
  if (!std::exchange(open_, false)) return;
  cudaGraph_t captured = nullptr;
  if (cudaStreamEndCapture(stream_, &captured) != cudaSuccess) (void)cudaGetLastError();
  const GraphHandle graph(captured);
}

cudaGraphExec_t GraphBatch::executable(cudaGraph_t graph, std::size_t kernels) {
  if (by_kernels_.size() <= kernels) by_kernels_.resize(kernels + 1);
  ExecutableHandle& known = by_kernels_[kernels];
  if (known) {
    cudaGraphExecUpdateResultInfo result{};
    if (cudaGraphExecUpdate(known.get(), graph, &result) == cudaSuccess) return known.get();
    (void)cudaGetLastError();
    retired_.push_back(std::move(known));
  }
  cudaGraphExec_t made = nullptr;
  check(cudaGraphInstantiate(&made, graph, 0), "make a batch of kernels executable");
  known.reset(made);
  return made;
}

}  // namespace sluice::gpu
