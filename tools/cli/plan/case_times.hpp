#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/bench/device.hpp"
#include "tools/cli/synthetic/synthetic_forwards.hpp"

namespace sluice::tools {

/// What a layer of a forward took, in microseconds, and moved.
struct CaseTimes {
  std::uint32_t rows = 1;
  double layer_us = 0.0;      ///< of forwards that were not traced
  double apart_us = 0.0;      ///< of it, its part of what a forward takes beside its layers
  double waited_us = 0.0;     ///< of it, that the device waited for the CPU
  double answer_us = 0.0;     ///< that the CPU took from seeing the question to its answer
  double far_bytes = 0.0;     ///< that it attended meanwhile
  double scored_bytes = 0.0;  ///< and read before that, to choose, see scored_share
  double scored_share = 0.0;  ///< of the tokens of each row and KV head
  /// [kStages] of traced forwards, without what was waited for; and the bytes on the stage's own lane.
  std::array<double, kStages> stage_us{};
  std::array<double, kStages> stage_bytes{};
  std::array<bool, kStages> ran{};
};

/// Of the tokens, those whose keys count as read where the CPU chooses: as many as an engine has counted, or all where
/// a policy reads something else of each, such as its channels for labels, which is not counted.
[[nodiscard]] double scored_share(const PolicySpec& policy, double counted) noexcept;

/// Times engines of their own on the layer: one that is not traced, and one that is.
/// @throws Interrupted
[[nodiscard]] CaseTimes time_case(SyntheticForwardsOptions options, const SyntheticLayer& layer,
                                  const DeviceSteps& steps, const std::shared_ptr<Device>& device,
                                  std::uint32_t warm_up);

/// Of the device's stages, what stamps cost and what kernels that overlap save: taken off each alike, so that the
/// stages together take what a layer takes, beside `apart_us`, in forwards that are not traced.
void correct(CaseTimes& times);

}  // namespace sluice::tools
