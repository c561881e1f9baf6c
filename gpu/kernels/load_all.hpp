#pragma once

#include <cstdint>

#include "gpu/kernels/forward/forward.hpp"

namespace sluice::gpu {

/// What the kernels can do on a device.
struct KernelLimits {
  bool warpgroups = false;          ///< it has the prefill kernels for Hopper
  bool attend_ring = false;         ///< see AttendVariant::ring
  std::uint32_t longest_top_p = 0;  ///< row of top-p that is held on chip
  std::uint32_t longest_top_k = 0;
  ForwardSplitLimits split{};
};

/// Loads every kernel on the current device, so that none is loaded while another spins.
/// @throws Error{Errc::device} if this build has no kernels for it
[[nodiscard]] KernelLimits load_all_kernels();

}  // namespace sluice::gpu
