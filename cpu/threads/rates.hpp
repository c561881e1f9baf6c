#pragma once

#include <cstdint>

#include "cpu/threads/workers.hpp"

namespace sluice::cpu {

/// Rate at which all workers together read plain memory, in GB/s: the ceiling for every kernel here. Reads a
/// buffer of `bytes` once in order, in a few passes of which the fastest counts; make it larger than the caches.
/// @throws Error{Errc::out_of_capacity} if the buffer cannot be had.
[[nodiscard]] double measure_read_gbps(const Workers& workers, std::uint64_t bytes);

}  // namespace sluice::cpu
