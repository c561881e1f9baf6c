#pragma once

#include <cstdint>

namespace sluice::gpu {

/// What the kernels that the current device runs were compiled for, which may be less than the device can do. Each
/// includes those before it.
enum class Compiled : std::uint8_t {
  any,         ///< compute capability 8.0
  clusters,    ///< 9.0: clusters of thread blocks, launches that overlap
  warpgroups,  ///< 9.0a: products of warpgroups
};
/// @throws Error{Errc::device} if no kernel was compiled for it
[[nodiscard]] Compiled compiled_for();

}  // namespace sluice::gpu
