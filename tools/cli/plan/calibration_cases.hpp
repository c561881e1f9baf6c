#pragma once

#include <cstdint>
#include <vector>

#include "sluice/engine_options.hpp"
#include "tools/cli/plan/machine.hpp"

namespace sluice::tools {

/// The default policy, whose costs are those of a machine; others have costs of their own beside them.
inline constexpr const char* kDefaultPolicy = "sluice";

/// An engine over a synthetic layer that a calibration times.
struct CalibrationCase {
  std::uint32_t tokens = 0;
  const char* policy = kDefaultPolicy;
  PlacementMode placement = PlacementMode::hybrid;
  std::uint32_t rows = 1;     ///< sequences; kBatchRows in a batch
  bool wide = false;          ///< with a long window, all of it near; see DefaultCases
  double near_share = 0.05;   ///< of the tokens, that device memory has room for
  std::uint32_t layers = 16;  ///< so many that what is far of all of them is in no cache of the CPU
  std::uint32_t warm_up = 64;
  std::uint32_t steps = 16;
};
/// Of a batch, from which on a GPU is full, whatever the KV heads: 4 sequences of 8 KV heads are 32 lists, for which
/// `split` has a thread block for each multiprocessor of the largest devices, or two.
inline constexpr std::uint32_t kBatchRows = 4;

/// Lengths that tell a rate from a fixed cost, the shortest of the default first.
[[nodiscard]] std::vector<CalibrationCase> calibration_cases(bool gpu, Effort effort);

}  // namespace sluice::tools
