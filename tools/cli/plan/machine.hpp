#pragma once

#include <cstdint>
#include <string>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/device.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What `sluice plan` knows of a machine, in a file that `sluice doctor --machine FILE` writes and that may be edited.
struct Machine {
  std::string name;
  scheduler::LaneRates rates{};
  std::uint64_t device_bytes = 0;  ///< memory of the device; 0: it is the host's
  std::uint64_t host_bytes = 0;    ///< that can be had
};

/// The machine that this runs on, measured; `device` null: the embedded host device.
/// @throws Error{Errc::out_of_capacity}
[[nodiscard]] Machine this_machine(const Device* device, std::uint32_t threads);

[[nodiscard]] Json to_json(const Machine& machine);
/// @throws Error{Errc::io}; Error{Errc::corrupt} naming file and field, if one is missing, unknown or not positive
[[nodiscard]] Machine load_machine(const std::string& path);

}  // namespace sluice::tools
