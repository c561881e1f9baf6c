#pragma once

#include "gpu/kernels/forward/forward.hpp"
#include "sluice/step/carver.hpp"

namespace sluice::gpu {

/// @throws Error{Errc::unsupported} if kernels cannot make clusters of this memory's keys, or not choose among them
void check_clusters(const ForwardMemory& memory);
/// What the kernels that do need, of rows that choose one by one.
void place_clusters(const ForwardMemory& rows, Carver& carver, ForwardScratch& scratch);

}  // namespace sluice::gpu
