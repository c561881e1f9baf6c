#pragma once

#include <cstdint>

namespace sluice::scheduler {

/// Tokens that a policy can take back exactly, whatever it has learnt from them: see LayerPolicy::truncate.
inline constexpr std::uint32_t kUndoTokens = 32;

}  // namespace sluice::scheduler
