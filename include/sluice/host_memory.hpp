#pragma once

#include <cstdint>

namespace sluice {

/// Host memory that this process can still take before the kernel reclaims or kills, its control groups' limits
/// included. Read anew at every call; the largest number if nothing limits it.
[[nodiscard]] std::uint64_t available_host_bytes();

}  // namespace sluice
