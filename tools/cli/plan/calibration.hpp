#pragma once

#include <cstdint>
#include <memory>

#include "sluice/device.hpp"
#include "tools/cli/plan/machine.hpp"

namespace sluice::tools {

/// Fills `stages`, `forward_us` and `dense` of a machine whose rates and memory are known, by timing forwards of
/// engines over synthetic layers there; `device` null: the embedded one. A stage that none of them has keeps what it
/// had.
/// @throws Interrupted
void calibrate(Machine& machine, std::shared_ptr<Device> device, std::uint32_t threads, Effort effort);

}  // namespace sluice::tools
