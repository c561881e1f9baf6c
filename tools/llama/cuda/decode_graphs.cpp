#include "tools/llama/cuda/decode_graphs.hpp"

#include "sluice/error.hpp"

namespace sluice::tools::cuda {

bool DecodeGraphs::run(Key key, cudaStream_t stream, const std::function<void()>& enqueue) {
  const auto [at, first] = captured_.try_emplace(key);
  Captured& captured = at->second;
  if (!first && !captured.refused && !captured.work) {
    bool queued = false;
    try {
      captured.work = capture(stream, [&] {
        enqueue();
        queued = true;
      });
    } catch (const Error&) {
      captured.refused = true;
      if (!queued) throw;
    }
  }
  captured.work ? captured.work->replay() : enqueue();
  return captured.work != nullptr;
}

}  // namespace sluice::tools::cuda
