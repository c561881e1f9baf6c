#include "tools/cli/bench/backend_of.hpp"

#include "cpu/backend/backend.hpp"
#include "cpu/machine/topology.hpp"

namespace sluice::tools {
namespace {

struct HostThreads {
  cpu::Topology topology;
  cpu::Workers workers{topology, {}};
  cpu::Backend backend{workers};
};

}  // namespace

std::shared_ptr<Backend> backend_of(Device& device) {
  if (Backend* const cuda = cuda_backend_of(device)) return {std::shared_ptr<void>(), cuda};
  const auto host = std::make_shared<HostThreads>();
  return {host, &host->backend};
}

}  // namespace sluice::tools
