#pragma once

namespace sluice::tools {

/// Of the tokens, those that device memory has room for where nobody says: with the default's 4-bit copies and means
/// 20% of keys and values. What is attended of a long sequence is less, and 5% are no faster.
inline constexpr double kUsualNearShare = 0.035;
inline constexpr const char* kUsualNearText = "3.5%";

}  // namespace sluice::tools
