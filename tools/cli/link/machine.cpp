#include "tools/cli/link/machine.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "gpu/device/cuda_error.hpp"
#include "sluice/error.hpp"
#include "tools/cli/link/transfer_profile.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/link/calibrate_transfers.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint64_t kBufferBytes = 256 * MiB;
constexpr std::uint64_t kQuickBufferBytes = 128 * MiB;

/// Node of the operating system nearest to the GPU; -1 if the system does not say.
int nearest_node(int ordinal) {
  int node = -1;
  if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, ordinal) != cudaSuccess) (void)cudaGetLastError();
  return node;
}

/// The nodes of the process are counted without gaps; on machines with gaps the nearest one has to be given.
std::uint32_t node_of(const LinkOptions& options, const cpu::Topology& topology, int gpu_node) {
  const int wanted = options.numa_node >= 0 ? options.numa_node : std::max(gpu_node, 0);
  const auto nodes = static_cast<int>(topology.numa_nodes());
  if (options.numa_node >= nodes)
    throw Error(Errc::invalid_argument, "--numa-node: there is no node " + std::to_string(options.numa_node) +
                                            "; this process may use " + std::to_string(nodes));
  return wanted < nodes ? static_cast<std::uint32_t>(wanted) : 0;
}

/// On a device of its own, as a device's profile is fixed when it is made.
std::shared_ptr<const TransferProfile> profile_of(const LinkOptions& options, double& calibration_s) {
  gpu::CudaDevice device(CudaDeviceOptions{.ordinal = options.device});
  const Clock::time_point begin = Clock::now();
  const auto profile = options.profile.empty() ? std::make_shared<const TransferProfile>(calibrate_transfers(device))
                                               : load_transfer_profile(options.profile);
  if (options.profile.empty()) calibration_s = std::chrono::duration<double>(Clock::now() - begin).count();
  if (!options.save_profile.empty())
    save_transfer_profile(*profile, cuda_device_facts(options.device), options.save_profile);
  return profile;
}

Json facts_of(const LinkMachine& machine) {
  const CudaDeviceFacts facts = cuda_device_facts(machine.options.device);
  int runtime = 0;
  gpu::check(cudaRuntimeGetVersion(&runtime), "read the runtime's version");
  return {{"gpu", facts.name},
          {"pci_bus_id", facts.pci_bus_id},
          {"cuda_driver", facts.driver},
          {"cuda_runtime", runtime},
          {"gpu_numa_node", machine.gpu_node < 0 ? Json() : Json(machine.gpu_node)},
          {"host_numa_node", machine.node},
          {"stream_memory_operations", machine.device.memory_operations()},
          {"calibration_s", machine.calibration_s > 0.0 ? Json(machine.calibration_s) : Json()},
          {"gather_blocks", machine.profile->gather_blocks},
          {"busy_gather_blocks", machine.profile->busy_gather_blocks}};
}

}  // namespace

LinkMachine::LinkMachine(const LinkOptions& link_options)
    : options(link_options),
      gpu_node(nearest_node(link_options.device)),
      node(node_of(link_options, topology, gpu_node)),
      workers(topology, {.threads = 0, .numa_node = node}),
      profile(profile_of(link_options, calibration_s)),
      device(CudaDeviceOptions{.ordinal = link_options.device, .profile = profile}),
      slab({.bytes = link_options.quick ? kQuickBufferBytes : kBufferBytes, .numa_node = node}, topology, workers),
      registration(device.register_host(slab.memory())),
      bench(device, slab.memory().size(), slab.memory()) {}

std::vector<TransferPath> link_paths(bool to_device) {
  std::vector<TransferPath> paths{TransferPath::copy_engine, TransferPath::batch, TransferPath::gather};
  if (to_device) paths.push_back(TransferPath::staged);
  return paths;
}

std::string format(const char* pattern, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), pattern, value);
  return text.data();
}

double link_gbps(std::uint64_t bytes, double us) { return us > 0.0 ? static_cast<double>(bytes) / us * 1e-3 : 0.0; }

LinkFindings measure_link(const LinkOptions& options) {
  const std::vector<std::string> sections = split_list(options.sections, "--sections");
  const auto wanted = [&](const char* name) {
    return std::find(sections.begin(), sections.end(), name) != sections.end();
  };
  LinkMachine machine(options);
  LinkFindings findings{.facts = facts_of(machine)};
  link_peaks(machine, findings);
  link_profile(machine, findings);
  if (wanted("transfers")) link_transfers(machine, findings);
  if (wanted("gather")) link_gather(machine, findings);
  if (wanted("load")) link_load(machine, findings);
  if (wanted("latency")) link_latency(machine, findings);
  if (wanted("pinning") && options.pin_gib > 0) link_pinning(machine, findings);
  return findings;
}

}  // namespace sluice::tools
