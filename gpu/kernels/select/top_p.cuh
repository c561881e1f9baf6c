#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/select/top_p.hpp"

/// What the kernels of top-p share: the order of values, what a pass over a row finds out, and the search. Keys of a
/// row are those of the values to be chosen from; what is attended anyway, few values as a rule, is read apart.
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
/// The same of values that are soft-capped before they are weighed. Keys order them as they were: where capped ones are
/// equal, too.
__device__ __forceinline__ float weight_of(std::uint32_t key, std::uint32_t top, float softcap) {
  if (softcap == 0.f) return weight_of(key, top);
  if (key == 0) return 0.f;
  const float below = detail::tanh_fast(value_of(key) / softcap) - detail::tanh_fast(value_of(top) / softcap);
  return key == top ? 1.f : detail::exp2_fast(softcap * below * kLog2E);
}

/// What a pass over the row finds out, of one thread or of all.
struct Found {
  float mass = 0.f;            ///< of the keys above the middle; or, exact up to 2^24, how many these are
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

/// Whether value i is to be chosen from. Nothing from `count` on is.
__device__ __forceinline__ bool is_choice(const TopPRow& task, std::uint32_t i) {
  return i - task.begin < task.end - task.begin;  // Before `begin` it wraps around.
}

/// Calls visit(key) for the values that are attended anyway, shared out among the row's threads.
template <class Row, class Visit>
__device__ __forceinline__ void for_each_anyway(const Row& row, const TopPRow& task, const Visit& visit) {
  const std::uint32_t anyway = task.count - (task.end - task.begin);
  for (std::uint32_t i = row.thread(); i < anyway; i += row.threads()) {
    visit(order_key(__ldg(task.values + (i < task.begin ? i : task.end + (i - task.begin)))));
  }
}

/// The largest key such that all above it, with what is attended anyway, hold `p` of the mass; kAll if the latter alone
/// does. `low` is the least key, less 1, `high` the largest, or a larger one of what is attended anyway. All keys above
/// `low` hold enough, those above `high` do not; both move to where keys are, so that the end is exact: nothing lies
/// between them. A row sums what its threads find by `reduce`, the same for all of them.
template <class Row>
__device__ std::uint32_t search(Row& row, const TopPRow& task, std::uint32_t low, std::uint32_t high,
                                std::uint32_t& turn) {
  row.weigh(high);
  const float p = task.p;
  float total = row.reduce(row.pass(low), turn++).mass;
  float anyway = 0.f;
  if (task.end - task.begin != task.count) {
    Found found;
    for_each_anyway(row, task, [&](std::uint32_t key) {
      found.mass += key != 0 ? weight_of(key, high, task.softcap) : 0.f;
    });
    anyway = row.reduce(found, turn++).mass;
    total += anyway;
  }
  const float need = p * total - anyway;
  if (anyway > 0.f && need <= 0.f) return kAll;
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

/// The least key from `low` on above which no more than `task.most` lie; above `high` none does. Both move as in
/// `search`. Of keys that are equal all count, or none.
template <class Row>
__device__ std::uint32_t at_most(Row& row, const TopPRow& task, std::uint32_t low, std::uint32_t high,
                                 std::uint32_t& turn) {
  const auto most = static_cast<float>(task.most);
  if (low >= high || row.reduce(row.count(low), turn++).mass <= most) return low;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    const Found found = row.reduce(row.count(middle), turn++);
    if (found.mass > most) {
      low = found.above - 1;
    } else {
      high = found.below;
    }
  }
  return high;
}

/// The largest key that is not kept; kAll if none is kept.
template <class Row>
__device__ std::uint32_t cut(Row& row, const TopPRow& task) {
  Found range = row.range();
  for_each_anyway(row, task, [&](std::uint32_t key) { range.below = max(range.below, key); });
  std::uint32_t turn = 0;
  range = row.reduce(range, turn++);
  if (range.above == kAll) return kAll;  // Nothing to choose from.
  const std::uint32_t low = task.p >= 1.f ? range.above : search(row, task, range.above, range.below, turn);
  return task.end - task.begin <= task.most ? low : at_most(row, task, low, range.below, turn);
}

}  // namespace sluice::gpu::top_p
