#include "tools/stages/stages.hpp"

#include "cpu/machine/topology.hpp"
#include "tools/stages/host_stages.hpp"

namespace sluice::tools {
namespace {

struct HostThreads {
  cpu::Topology topology;
  cpu::Workers workers{topology, {}};
  HostStages stages{{.workers = workers}};
};

}  // namespace

std::shared_ptr<Stages> stages_of(Device& device) {
  if (auto cuda = cuda_stages_of(device)) return cuda;
  const auto host = std::make_shared<HostThreads>();
  return {host, &host->stages};
}

}  // namespace sluice::tools
