#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

/// Who attends what was selected but is not near.
enum class PlacementMode : std::uint8_t {
  hybrid,   ///< far tokens are attended in place by the CPU; nothing is fetched on the critical path
  stream,   ///< selected far pages are fetched over the link and attended by the device
  near,     ///< everything is kept near; a sequence that does not fit the near pool is refused
  automatic ///< per KV head, whichever of far and fetch the cost model calls cheaper
};

[[nodiscard]] constexpr bool is_valid(PlacementMode mode) noexcept { return mode <= PlacementMode::automatic; }

[[nodiscard]] constexpr const char* to_string(PlacementMode mode) noexcept {
  switch (mode) {
    case PlacementMode::hybrid: return "hybrid";
    case PlacementMode::stream: return "stream";
    case PlacementMode::near: return "near";
    case PlacementMode::automatic: return "auto";
  }
  return "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists the modes.
[[nodiscard]] PlacementMode parse_placement(std::string_view text);

/// Rates that placement decides by, measured at start-up. 1 GB = 1e9 bytes.
struct CostRates {
  double far_runs_gbps = 8.0;      ///< CPU attention over whole pages, all workers
  double far_tokens_gbps = 4.0;    ///< CPU attention over scattered rows, all workers
  double link_gbps = 8.0;          ///< whole pages, host to device
  double link_latency_us = 20.0;   ///< of one fetch, enqueue to usable
  double near_gbps = 8.0;          ///< device attention over near pages
};

/// The three lanes of the pipeline. Work in one lane is in order; lanes overlap.
enum class Lane : std::uint8_t { cpu, link, device };

[[nodiscard]] constexpr const char* to_string(Lane lane) noexcept {
  return lane == Lane::cpu ? "cpu" : lane == Lane::link ? "link" : "device";
}

}  // namespace sluice
