#pragma once

#include <algorithm>
#include <cstdint>

#include "sluice/page.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// What choosing takes on a GPU beyond what reading does: scores, lists, an answer of the CPU, of one sequence.
inline constexpr double kChoosingUs = 40.0;

/// Tokens of a sequence up to which a device that reads near rows at `near_gbps` attends all of them in the time that
/// choosing takes alone; 0 if the rate is not known. 1 GB = 1e9 bytes.
[[nodiscard]] inline std::uint32_t advised_dense_tokens(const AttentionShape& shape, const PageLayout& near,
                                                        double near_gbps) noexcept {
  const double bytes = 2.0 * static_cast<double>(near.row_bytes()) * shape.kv_heads;
  constexpr double kBytesPerUs = 1e3;
  constexpr double kMost = 1 << 20;
  return static_cast<std::uint32_t>(std::clamp(kChoosingUs * near_gbps * kBytesPerUs / bytes, 0.0, kMost));
}

}  // namespace sluice::scheduler
