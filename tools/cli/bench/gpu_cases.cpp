#include "tools/cli/bench/gpu_cases.hpp"

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

PolicySpec timed_policy(const std::string& text) {
  PolicySpec spec = parse_policy(text);
  spec.dense_layers = spec.dense_every = 0;
  spec.rehearsed = false;  // No layer comes before.
  return spec;
}

std::vector<GpuCase> gpu_cases(const BenchGpuOptions& options) {
  std::vector<GpuCase> cases;
  for (const std::string& policy : split_policies(options.policies)) {
    const PolicySpec spec = timed_policy(policy);
    if (options.far != "auto") (void)with_far(policy, options.far, {}, {});  // Refused before anything is built.
    for (const std::string& placement : split_list(options.placements, "--placements")) {
      const bool all_near = placement == kNear;
      if (all_near && scheduler::chooser(spec) == scheduler::Chooser::cpu)
        throw Error(Errc::unsupported, "--placements near: policy '" + policy +
                                           "' chooses on the CPU, which reads keys in host memory; place it hybrid or "
                                           "stream");
      for (const std::uint32_t rows : parse_counts(options.rows, "--rows"))
        cases.push_back({.policy = policy,
                         .spec = spec,
                         .placement = all_near ? PlacementMode::hybrid : parse_placement(placement),
                         .all_near = all_near,
                         .rows = rows});
    }
  }
  return cases;
}

}  // namespace sluice::tools
