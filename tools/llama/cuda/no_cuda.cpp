// Stands in for the CUDA engine in a build without CUDA.
#include "sluice/error.hpp"
#include "tools/llama/engine.hpp"

namespace sluice::tools {

std::unique_ptr<Engine> make_cuda_engine(const ModelConfig&, const WeightSource&, const ModelOptions& options) {
  throw Error(Errc::unsupported, "no model can run on " + options.device->info().name +
                                     ": this build is without CUDA; build with -DSLUICE_CUDA=ON, or run the model "
                                     "on the CPU");
}

}  // namespace sluice::tools
