#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/device.hpp"
#include "tools/cli/plan/policy_costs.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What `sluice plan` knows of a machine, in a file that `sluice doctor --machine FILE` writes and that may be edited.
struct Machine {
  std::string name;
  scheduler::LaneRates rates{};
  scheduler::StageCost dense{};    ///< of a layer's dense attention in device memory, one launch for all rows
  std::uint64_t device_bytes = 0;  ///< memory of the device; 0: it is the host's
  std::uint64_t host_bytes = 0;    ///< that can be had
  std::vector<PolicyCosts> policies{};  ///< of other policies than the default, whose costs `rates` has
};

/// How much of its time a machine is measured for.
enum class Effort : std::uint8_t {
  brief,     ///< a look: up to 32K tokens
  thorough,  ///< up to 128K tokens, all kinds of policies, and batches; a minute or two on a GPU
};
/// The machine that this runs on: its rates, and what each stage of a forward takes; `device` null: the embedded one.
/// @throws Error{Errc::out_of_capacity}; Interrupted
[[nodiscard]] Machine this_machine(std::shared_ptr<Device> device, std::uint32_t threads, Effort effort);

[[nodiscard]] Json to_json(const Machine& machine);
/// @throws Error{Errc::io}; Error{Errc::corrupt} naming file and field, if one is missing, unknown or not positive
[[nodiscard]] Machine load_machine(const std::string& path);

}  // namespace sluice::tools
