#include "sluice/error.hpp"
#include "tools/cli/bench/graph.hpp"

namespace sluice::tools {

bool can_capture(const Device&, Handover) noexcept { return false; }

std::unique_ptr<CapturedWork> capture(void*, const std::function<void()>&) {
  throw Error(Errc::unsupported, "this build has no CUDA, and no graphs");
}

}  // namespace sluice::tools
