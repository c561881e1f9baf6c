#include "tools/cli/bench/graph.hpp"

#include <cuda_runtime_api.h>

#include "gpu/device/cuda_error.hpp"

namespace sluice::tools {
namespace {

using gpu::check;

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
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(status, "instantiate a graph");
  }
  ~CudaGraphWork() override { (void)cudaGraphExecDestroy(exec_); }
  void replay() override { check(cudaGraphLaunch(exec_, stream_), "launch a graph"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

bool can_capture(const Device& device, Handover handover) noexcept { return device.info().captures_forwards(handover); }

std::unique_ptr<CapturedWork> capture(void* stream, const std::function<void()>& enqueue) {
  return std::make_unique<CudaGraphWork>(static_cast<cudaStream_t>(stream), enqueue);
}

}  // namespace sluice::tools
