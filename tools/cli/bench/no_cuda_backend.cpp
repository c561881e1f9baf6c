// In place of cuda_backend.cpp where there is no CUDA.
#include "tools/cli/bench/backend_of.hpp"

namespace sluice::tools {

Backend* cuda_backend_of(Device&) noexcept { return nullptr; }

}  // namespace sluice::tools
