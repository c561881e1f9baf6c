#pragma once

#include "tools/cli/plan/planner.hpp"

namespace sluice::tools {

/// Of the tokens that a row attends, the share that lies near when they are wanted, and where that is from.
struct NearHits {
  double share = 0.0;
  const char* from = "";
};

/// By default: what was measured of the policy with structured attention, half where nothing was, and no more than near
/// memory has room for. `work` says all but its near_hits.
[[nodiscard]] NearHits usual_near_hits(const Workload& work);
/// Of the tokens that a row attends, the few far ones that a GPU attends itself, by default: all that are far, or none.
/// `work` says all but that.
[[nodiscard]] double usual_linked(const Workload& work, const Machine& machine);
inline constexpr const char* kUsualHitsText = "measured of the policy, structured attention; else 50%, a guess";

}  // namespace sluice::tools
