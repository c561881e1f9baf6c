#pragma once

#include <cstdint>

namespace sluice::runtime {

/// What the device asks.
struct FarQuestion {
  std::uint64_t asked = 0;
  std::uint64_t forward = 0;
  std::uint32_t layer = 0;
  std::uint32_t drafts = 1;  ///< of each team, see ForwardMemory::teams
  std::uint32_t lists = 0;   ///< of far rows
};

}  // namespace sluice::runtime
