#pragma once

#include <optional>
#include <vector>

#include "scheduler/plan/cost_model.hpp"
#include "tools/cli/plan/case_times.hpp"

namespace sluice::tools {

/// What forwards of the default policy took that were alike but for what is said here.
struct DefaultCases {
  std::vector<CaseTimes> plain;  ///< of several lengths
  /// As one of these, but for a window of recent tokens that is far longer, all of it near; or none.
  std::optional<CaseTimes> wide{};
};

/// What `choose`, `split` and `attend` take together. `choose` does nothing where tokens are counted, and `attend`
/// nothing where `split` attends.
[[nodiscard]] double split_to_attend_us(const CaseTimes& times) noexcept;
/// Makes `attend` as much of it as that at least, and `split` the rest.
void set_attend_us(CaseTimes& times, double near_us) noexcept;

/// Makes `attend` of all cases what near rows take, wherever they are attended: of what `choose`, `split` and `attend`
/// take together, what is more in the wide case is its near rows'. A device may attend in `split` what that finds, with
/// nothing left for `attend`; then stamps alone tell that near rows cost nothing. Without a wide case nothing changes.
void tell_near_apart(DefaultCases& cases, double device_gbps);

/// The costs of `append`, `score`, `choose`, `split`, `attend` and `merge` that all of the cases fit; what none of them
/// has run has none.
[[nodiscard]] scheduler::StageCosts default_costs(const DefaultCases& cases, double device_gbps);

}  // namespace sluice::tools
