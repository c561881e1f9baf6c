#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/plan/measured.hpp"
#include "tools/cli/plan/planner.hpp"
#include "tools/cli/text/report.hpp"

/// The tables of `sluice plan`.
namespace sluice::tools {

[[nodiscard]] Table plan_table();
/// What a row of the plan is of.
struct PlanName {
  std::string policy;
  std::string hits_from;  ///< see NearHits
};
[[nodiscard]] std::vector<Json> plan_row(const PlanName& name, const Workload& work, const Machine& machine,
                                         std::uint64_t reserved, const WorkloadPlan& found);
[[nodiscard]] Table memory_table();
[[nodiscard]] std::vector<Json> memory_row(const std::string& name, const Workload& work,
                                           const EngineMemoryUse& memory);
[[nodiscard]] Table compared_table();
[[nodiscard]] std::vector<Json> compared_row(const Measured& measured, const WorkloadPlan& found);

}  // namespace sluice::tools
