#pragma once

#include <string>
#include <vector>

#include "tools/cli/plan/planner.hpp"

namespace sluice::tools {

/// A configuration that `sluice bench gpu` has timed, with the shares of tokens that it found: what of them lies near,
/// how many are attended and brought near is the model's doing, not the machine's.
struct Measured {
  std::string policy;
  Workload work;
  double layer_us = 0.0;
  double dense_us = 0.0;  ///< of a layer's dense attention, all rows
};

/// Of a report, the forwards that were replayed as a graph, or all if none was.
/// @throws Error{Errc::io}; Error{Errc::corrupt} naming the file and what lacks
[[nodiscard]] std::vector<Measured> load_measured(const std::string& path);

}  // namespace sluice::tools
