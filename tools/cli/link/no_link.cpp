// In place of the files beside it in a build without CUDA.
#include "sluice/error.hpp"
#include "tools/cli/link/link.hpp"

namespace sluice::tools {

LinkFindings measure_link(const LinkOptions&) {
  throw Error(Errc::unsupported, "link: this build has no CUDA device; build with nvcc 13 on the PATH");
}

}  // namespace sluice::tools
