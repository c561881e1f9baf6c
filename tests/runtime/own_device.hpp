#pragma once

#include <memory>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"

namespace sluice::test {

/// A host device with workers of its own.
inline std::shared_ptr<cpu::HostDevice> own_device(Handover handover = Handover::device) {
  const cpu::Topology topology;
  auto workers = std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false});
  return std::make_shared<cpu::HostDevice>(std::move(workers),
                                           cpu::HostDeviceOptions{.faults = {}, .handover = handover});
}

}  // namespace sluice::test
