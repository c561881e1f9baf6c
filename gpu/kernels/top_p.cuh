#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/top_p.hpp"

/// What the kernels of top-p share: the order of values, what a pass over a row finds out, and the search.
namespace sluice::gpu::top_p {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 1024;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
static_assert(kWarps == kWarp, "the last step of a reduction has one lane per warp");
inline constexpr std::uint32_t kAll = 0xffff'ffffu;
inline constexpr float kLog2E = 1.44269504f;

/// Unsigned keys in the order of the values; 0 for what is never kept. The two zeros are equal.
__device__ __forceinline__ std::uint32_t order_key(float value) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(value, 0.f));
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u || bits == 0xff80'0000u) return 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x8000'0000u : ~key);
}
/// Relative to the largest key's. Infinities are equal, though their difference is not 0.
__device__ __forceinline__ float weight_of(std::uint32_t key, std::uint32_t top) {
  return key == top ? 1.f : detail::exp2_fast((value_of(key) - value_of(top)) * kLog2E);
}

/// What a pass over the row finds out, of one thread or of all.
struct Found {
  float mass = 0.f;            ///< of the keys above the middle
  std::uint32_t above = kAll;  ///< the least of these
  std::uint32_t below = 0;     ///< the largest of the others

  __device__ __forceinline__ void add(std::uint32_t key, float weight, std::uint32_t middle) {
    const bool counts = key > middle;
    mass += counts ? weight : 0.f;
    above = min(above, counts ? key : kAll);
    below = max(below, counts ? 0 : key);
  }
};

__device__ __forceinline__ Found over_lanes(Found found) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) found.mass += __shfl_xor_sync(kAll, found.mass, step);
  found.above = __reduce_min_sync(kAll, found.above);
  found.below = __reduce_max_sync(kAll, found.below);
  return found;
}

/// `above`: the least key of those that count, less 1; `below`: the largest.
__device__ __forceinline__ void add_to_range(std::uint32_t key, Found& found) {
  found.above = min(found.above, key - 1);  // 0 becomes the largest.
  found.below = max(found.below, key);
}

/// The largest key such that all above it hold `p` of the mass; `low` and `high` are the least key, less 1, and the
/// largest. All keys above `low` hold enough, those above `high` do not; both move to where keys are, so that the end
/// is exact: nothing lies between them. A row sums what its threads find by `reduce`, the same for all of them.
template <class Row>
__device__ std::uint32_t search(Row& row, const TopPRow& task, std::uint32_t low, std::uint32_t high) {
  row.weigh(high);
  const float p = task.p;
  std::uint32_t turn = 1;
  const float total = row.reduce(row.pass(low), turn++).mass;
  const float need = p * total;
  // What is lighter than this can be left out altogether: a start that saves the first halvings.
  const float light = (1.f - p) * total / static_cast<float>(task.count);
  std::uint32_t middle = order_key(value_of(high) + logf(light));
  while (high - low > 1) {
    if (middle <= low || middle >= high) middle = low + (high - low) / 2;
    const Found found = row.reduce(row.pass(middle), turn++);
    if (found.mass >= need) {
      low = found.above - 1;
    } else {
      high = found.below;
    }
    middle = low + (high - low) / 2;
  }
  return low;
}

}  // namespace sluice::gpu::top_p
