#pragma once

#include <cstdint>

namespace sluice {

/// Shares of far rows are counted in as many parts.
inline constexpr std::uint32_t kWholeFetchShare = 256;

/// The nearest share of kWholeFetchShare. `share` in [0, 1].
[[nodiscard]] constexpr std::uint32_t fetch_share_of(float share) noexcept {
  return static_cast<std::uint32_t>(share * static_cast<float>(kWholeFetchShare) + 0.5f);
}

/// Of a list of `far` rows, those that the device attends over the link, at most that share of them; the CPU attends
/// the others. Whole units of attention (16 rows), and none of a list that the CPU attends before a row has crossed the
/// link. Longer lists have no fewer.
[[nodiscard]] constexpr std::uint32_t fetched_rows(std::uint32_t far, std::uint32_t share) noexcept {
  constexpr std::uint32_t kUnit = 16;
  constexpr std::uint32_t kLeastCut = 64;
  if (share >= kWholeFetchShare) return far;
  if (far < kLeastCut) return 0;
  const std::uint64_t rows = std::uint64_t{far} * share / kWholeFetchShare;
  return static_cast<std::uint32_t>(rows / kUnit * kUnit);
}

}  // namespace sluice
