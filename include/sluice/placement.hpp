#pragma once

#include <cstdint>
#include <string_view>

#include "sluice/error.hpp"

namespace sluice {

/// Where chosen rows that are not near are attended.
enum class PlacementMode : std::uint8_t {
  hybrid,  ///< the CPU, in place, while the device attends what is near
  stream,  ///< the device, over the link
};

[[nodiscard]] constexpr bool is_valid(PlacementMode mode) noexcept { return mode <= PlacementMode::stream; }

[[nodiscard]] constexpr const char* to_string(PlacementMode mode) noexcept {
  return mode == PlacementMode::hybrid ? "hybrid" : mode == PlacementMode::stream ? "stream" : "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists the modes.
[[nodiscard]] PlacementMode parse_placement(std::string_view text);

}  // namespace sluice
