#include "tools/llama/cuda/decode_graphs.hpp"

#include "sluice/error.hpp"

namespace sluice::tools::cuda {

bool DecodeGraphs::run(std::uint32_t rows, cudaStream_t stream, const std::function<void()>& enqueue) {
  const auto [at, first] = of_rows_.try_emplace(rows);
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
