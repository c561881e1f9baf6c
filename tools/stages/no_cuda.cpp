// In place of the files beside it in a build without CUDA.
#include "tools/stages/stages.hpp"

namespace sluice::tools {

std::shared_ptr<Stages> cuda_stages_of(Device&) { return nullptr; }

}  // namespace sluice::tools
