// In a build without CUDA.
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/soak/ground.hpp"

namespace sluice::test {

std::unique_ptr<World> cuda_world(int ordinal, std::shared_ptr<Faults> /*faults*/) {
  (void)make_cuda_device({.ordinal = ordinal});
  throw Error(Errc::unsupported, "this build has no CUDA device");
}

}  // namespace sluice::test
