#pragma once

#include "sluice/cuda.hpp"

namespace sluice::tools {

/// Measures every path, first on an idle device and then beside a kernel that keeps its memory busy, for 1 to 2 s
/// together. Allocates meanwhile about 0.5 GiB of the device's memory and 0.2 GiB of the host's, pinned. Where kernels
/// run one at a time, as under some tools, there are no busy samples.
/// @throws Error{Errc::out_of_capacity}; Error{Errc::device}; Error{Errc::invalid_argument} if `device` is no CUDA
///         device; Error{Errc::unsupported} in a build without CUDA.
[[nodiscard]] TransferProfile calibrate_transfers(Device& device);

}  // namespace sluice::tools
