#pragma once

#include "cpu/kernels/kernels.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/error.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::cpu {

/// @throws Error{Errc::invalid_argument} for more clusters than keys, none, or no iteration.
void check_clusters(const ClusterTask& task);

/// K-means over the keys of one KV head, see ClusterTask; by the thread that calls.
/// @throws as check_clusters; nothing was written
void k_means(const Kernels& kernels, const ClusterTask& task);
/// By all workers; what comes out is the same.
/// @throws as Workers::parallel_for, too
void k_means(const Kernels& kernels, const ClusterTask& task, const Workers& workers);

}  // namespace sluice::cpu
