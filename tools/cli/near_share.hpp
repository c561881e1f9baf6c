#pragma once

#include <algorithm>
#include <cstdint>

namespace sluice::tools {

/// Of a sequence's tokens, those that device memory has room for where nobody says: with the default's 4-bit copies and
/// means 20% of keys and values, of a long one. A short one has room for what the default attends of it.
[[nodiscard]] constexpr double usual_near_share(std::uint32_t tokens) noexcept {
  constexpr double kShare = 0.035;  ///< 5% are no faster, from 32K tokens on
  constexpr double kTokens = 512.0;
  return std::clamp(kTokens / std::max(1u, tokens), kShare, 1.0);
}
inline constexpr const char* kUsualNearText = "3.5%, at least 512 tokens";

}  // namespace sluice::tools
