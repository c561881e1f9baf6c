#include "tools/llama/graph.hpp"

#include <cuda_runtime_api.h>

#include "tools/llama/cuda/check.hpp"

namespace sluice::tools {
namespace {

using cuda::check;

class CudaGraphWork final : public CapturedWork {
 public:
  CudaGraphWork(cudaStream_t stream, const std::function<void()>& enqueue) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture a stream");
    cudaGraph_t graph = nullptr;
    try {
      enqueue();
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "end the capture of a stream");
    cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes_);
    if (status == cudaSuccess) status = cudaGraphInstantiate(&exec_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(status, "instantiate a graph");
  }
  ~CudaGraphWork() override { (void)cudaGraphExecDestroy(exec_); }
  void replay() override { check(cudaGraphLaunch(exec_, stream_), "launch a graph"); }
  [[nodiscard]] std::size_t nodes() const noexcept override { return nodes_; }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
  std::size_t nodes_ = 0;
};

}  // namespace

bool can_capture(const Device& device, Handover handover) noexcept { return device.info().captures_forwards(handover); }

std::unique_ptr<CapturedWork> capture(void* stream, const std::function<void()>& enqueue) {
  return std::make_unique<CudaGraphWork>(static_cast<cudaStream_t>(stream), enqueue);
}

}  // namespace sluice::tools
