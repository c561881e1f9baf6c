// In place of the files beside it in a build without CUDA.
#include "sluice/error.hpp"
#include "tools/link/calibrate_transfers.hpp"

namespace sluice::tools {

TransferProfile calibrate_transfers(Device&) {
  throw Error(Errc::unsupported, "a link to measure: this build has no CUDA device; build with nvcc 13 on the PATH");
}

}  // namespace sluice::tools
