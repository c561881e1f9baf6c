#pragma once

#include <cstdint>

/// Runs that are sorted apart, one behind the other in one array, and merged by looking each key up in all other runs.
namespace sluice::gpu::sorted_run {

/// How many of a run's keys, in [begin, end), come before `key`; with `equal` ones also those that are equal.
[[nodiscard]] __device__ inline std::uint32_t before(const std::uint32_t* keys, std::uint32_t begin, std::uint32_t end,
                                                     std::uint32_t key, bool equal) {
  std::uint32_t low = begin;
  while (low < end) {
    const std::uint32_t middle = (low + end) / 2;
    if (keys[middle] < key || (equal && keys[middle] == key)) {
      low = middle + 1;
    } else {
      end = middle;
    }
  }
  return low - begin;
}

/// Where key `i` of `count` belongs among all of them, equal ones in the order of their runs. `kRun`: keys of a run, of
/// which the last one may have fewer.
template <std::uint32_t kRun>
[[nodiscard]] __device__ inline std::uint32_t place_of(const std::uint32_t* keys, std::uint32_t count,
                                                       std::uint32_t i) {
  const std::uint32_t key = keys[i];
  const std::uint32_t own = i / kRun;
  std::uint32_t place = i % kRun;
  for (std::uint32_t run = 0; run * kRun < count; ++run) {
    if (run != own) place += before(keys, run * kRun, min((run + 1) * kRun, count), key, run < own);
  }
  return place;
}

}  // namespace sluice::gpu::sorted_run
