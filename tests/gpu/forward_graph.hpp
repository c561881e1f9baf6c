#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

namespace sluice::test {

/// Of engines whose forwards are captured: short sequences, `near_blocks` of whose blocks may be near.
inline EngineOptions graph_options(const AttentionShape& shape, std::uint32_t rows, std::uint32_t near_blocks) {
  EngineOptions options = named({.shape = shape, .largest = {.decode_rows = rows}, .threads = 4},
                                {"exact | int4 | top_k=256 | near=0,sinks=4,recent=508"});
  const std::uint64_t block = PageLayout{.head_dim = shape.head_dim}.page_bytes() * shape.layers * shape.kv_heads;
  options.host_bytes = 80 * rows * block;
  options.sequences = std::max(options.sequences, rows);
  options.near_bytes = near_blocks * block;
  return options;
}

inline constexpr const char* kGraphPolicy = "exact | int4 | top_k=40 | near=0,sinks=4,recent=24";

/// A forward of an engine, captured once. What CUDA refuses is an Error{Errc::device}.
class ForwardGraph {
 public:
  ForwardGraph(Engine& engine, ForwardTensors& tensors, cudaStream_t stream)
      : ForwardGraph(engine, tensors, engine.options().largest, stream) {}
  ForwardGraph(Engine& engine, ForwardTensors& tensors, const Bucket& bucket, cudaStream_t stream)
      : ForwardGraph(stream, cudaStreamCaptureModeRelaxed, [&] { tensors.attend(engine, bucket, stream); }) {}
  /// `enqueue` enqueues the forward on `stream`, which is captured meanwhile.
  template <class Enqueue>
  ForwardGraph(cudaStream_t stream, cudaStreamCaptureMode mode, const Enqueue& enqueue) : stream_(stream) {
    require(cudaStreamBeginCapture(stream, mode), "begin a capture");
    enqueue();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream, &graph), "end a capture");
    require(cudaGraphGetNodes(graph, nullptr, &nodes_), "count a graph's nodes");
    require(cudaGraphInstantiate(&exec_, graph, 0), "instantiate a graph");
    require(cudaGraphDestroy(graph), "destroy a graph");
  }
  ~ForwardGraph() { (void)cudaGraphExecDestroy(exec_); }
  ForwardGraph(const ForwardGraph&) = delete;
  ForwardGraph& operator=(const ForwardGraph&) = delete;

  void replay() const { replay(stream_); }
  void replay(cudaStream_t stream) const { require(cudaGraphLaunch(exec_, stream), "replay a graph"); }
  [[nodiscard]] std::size_t nodes() const { return nodes_; }

 private:
  static void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
      throw Error(Errc::device, std::string("CUDA does not ") + what + ": " + cudaGetErrorString(status));
  }

  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
  std::size_t nodes_ = 0;
};

/// Runs the largest bucket's forward, that is planned: replayed, or enqueued if there is no graph. Appends the outputs of
/// `rows` rows to `all`.
inline void run_planned(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, const ForwardGraph* graph,
                        const Batch& batch, std::uint32_t rows, std::vector<float>& all) {
  if (graph != nullptr) {
    graph->replay();
  } else {
    tensors.attend(engine, rig.stream);
  }
  engine.finish(batch);
  rig.synchronize();
  for (std::uint32_t row = 0; row < rows; ++row) {
    const auto out = tensors.out(row);
    all.insert(all.end(), out.begin(), out.end());
  }
}

}  // namespace sluice::test
