#pragma once

#include "gpu/kernels/cluster/cluster.hpp"
#include "sluice/step/carver.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// A task as the kernels see it but for its frames, with scratch memory that `scratch` hands out.
[[nodiscard]] ClusterItem cluster_item(const ClusterTask& task, Carver& scratch);

}  // namespace sluice::gpu
