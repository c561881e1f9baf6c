#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/machine/slab.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "gpu/device/cuda_device.hpp"
#include "sluice/cuda.hpp"
#include "tools/cli/link/link.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/link/bench.hpp"

namespace sluice::tools {

/// What the sections of `sluice link` measure with: both ends of the link and the transfer profile in use.
struct LinkMachine {
  explicit LinkMachine(const LinkOptions& options);

  const LinkOptions& options;
  cpu::Topology topology;
  int gpu_node;                ///< as the operating system counts nodes; -1 if unknown
  std::uint32_t node;          ///< of the host's buffers
  cpu::Workers workers;        ///< on that node first
  double calibration_s = 0.0;  ///< what the profile took; 0 for one from a file
  std::shared_ptr<const TransferProfile> profile;
  gpu::CudaDevice device;  ///< chooses by `profile`
  cpu::Slab slab;
  std::unique_ptr<Registration> registration;
  TransferBench bench;
  ProgressBar bar{"link"};
};

/// Paths that are measured in this direction; the staged one copies to the device only.
[[nodiscard]] std::vector<TransferPath> link_paths(bool to_device);
/// One number, by a pattern of printf.
[[nodiscard]] std::string format(const char* pattern, double value);
/// 1e9 bytes per second.
[[nodiscard]] double link_gbps(std::uint64_t bytes, double us);

/// Each section adds its tables, facts and sentences.
void link_peaks(LinkMachine& machine, LinkFindings& findings);
void link_transfers(LinkMachine& machine, LinkFindings& findings);
void link_profile(LinkMachine& machine, LinkFindings& findings);
void link_gather(LinkMachine& machine, LinkFindings& findings);
void link_load(LinkMachine& machine, LinkFindings& findings);
void link_latency(LinkMachine& machine, LinkFindings& findings);
void link_pinning(LinkMachine& machine, LinkFindings& findings);

}  // namespace sluice::tools
