// Stands in for the CUDA engine, and for graphs, in a build without CUDA.
#include "sluice/error.hpp"
#include "tools/llama/engine.hpp"
#include "tools/llama/graph.hpp"

namespace sluice::tools {

std::unique_ptr<Engine> make_cuda_engine(const ModelConfig&, const WeightSource&, const ModelOptions& options) {
  throw Error(Errc::unsupported, "no model can run on " + options.device->info().name +
                                     ": this build is without CUDA; build with -DSLUICE_CUDA=ON, or run the model "
                                     "on the CPU");
}

bool can_capture(const Device&, Handover) noexcept { return false; }

std::unique_ptr<CapturedWork> capture(void*, const std::function<void()>&) {
  throw Error(Errc::unsupported, "this build has no CUDA, and no graphs");
}

}  // namespace sluice::tools
