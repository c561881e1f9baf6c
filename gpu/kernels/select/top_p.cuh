#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/select/top_p.hpp"
#include "sluice/step/order_key.hpp"

/// What the kernels of top-p share: the order of values, what a pass over a row finds out, and the search. Keys of a
/// row are those of the values to be chosen from; what is attended anyway, few values as a rule, is read apart.
namespace sluice::gpu::top_p {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 1024;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
static_assert(kWarps == kWarp, "the last step of a reduction has one lane per warp");
inline constexpr std::uint32_t kAll = 0xffff'ffffu;

/// Of a key that is not 0, see weighed_key.
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x8000'0000u : ~key);
}
/// Relative to the largest key's. Infinities are equal, though their difference is not 0.
__device__ __forceinline__ float weight_of(std::uint32_t key, std::uint32_t top) {
  return key == top ? 1.f : detail::exp2_fast((value_of(key) - value_of(top)) * detail::kLog2E);
}
/// The same of values that are soft-capped before they are weighed. Keys order them as they were: where capped ones are
/// equal, too.
__device__ __forceinline__ float weight_of(std::uint32_t key, std::uint32_t top, float softcap) {
  if (softcap == 0.f) return weight_of(key, top);
  if (key == 0) return 0.f;
  const float below = detail::tanh_fast(value_of(key) / softcap) - detail::tanh_fast(value_of(top) / softcap);
  return key == top ? 1.f : detail::exp2_fast(softcap * below * detail::kLog2E);
}

/// Two bits of the answer a pass: with more pivots passes take longer than they save.
inline constexpr std::uint32_t kPivots = 3;

/// What a pass over the row sums for each pivot, of one thread or of all: the weight of the keys above it, or how many
/// these are, exact up to 2^24.
struct Sums {
  float of[kPivots] = {};

  __device__ __forceinline__ void add(std::uint32_t key, float weight, const std::uint32_t (&pivots)[kPivots]) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) of[p] += key > pivots[p] ? weight : 0.f;
  }
};
__device__ __forceinline__ Sums over_lanes(Sums sums) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) sums.of[p] += __shfl_xor_sync(kAll, sums.of[p], step);
  }
  return sums;
}
__device__ __forceinline__ Sums both(Sums sums, const Sums& others) {
#pragma unroll
  for (std::uint32_t p = 0; p < kPivots; ++p) sums.of[p] += others.of[p];
  return sums;
}

/// The least key of those that count, less 1, and the largest; none count: kAll.
struct Range {
  std::uint32_t least = kAll;
  std::uint32_t largest = 0;

  __device__ __forceinline__ void add(std::uint32_t key) {
    least = min(least, key - 1);  // 0 becomes the largest.
    largest = max(largest, key);
  }
};
__device__ __forceinline__ Range over_lanes(const Range& range) {
  return {.least = __reduce_min_sync(kAll, range.least), .largest = __reduce_max_sync(kAll, range.largest)};
}
__device__ __forceinline__ Range both(const Range& range, const Range& other) {
  return {.least = min(range.least, other.least), .largest = max(range.largest, other.largest)};
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
    visit(weighed_key(__ldg(task.values + (i < task.begin ? i : task.end + (i - task.begin)))));
  }
}

/// Where the answer lies: what is above `low` is enough, or too much, what is above `high` is not.
struct Interval {
  std::uint32_t low;
  std::uint32_t high;

  [[nodiscard]] __device__ bool open() const { return high - low > 1; }
  /// Keys that divide it evenly.
  __device__ void divide(std::uint32_t (&pivots)[kPivots]) const {
    const std::uint32_t step = (high - low) / (kPivots + 1);
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p)
      pivots[p] = step != 0 ? low + (p + 1) * step : min(low + 1 + p, high - 1);
  }
  /// @param enough  bit p: of pivot p, which ascend, the answer lies above
  __device__ void narrow(const std::uint32_t (&pivots)[kPivots], std::uint32_t enough) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      if ((enough >> p & 1) != 0) {
        low = pivots[p];
      } else {
        high = min(high, pivots[p]);
      }
    }
  }
};

/// Pivots by value, from the weight that can be left out altogether, which is where most of a row lies, up to the
/// largest.
__device__ inline void divide_by_value(const Interval& in, float light, std::uint32_t (&pivots)[kPivots]) {
  const float top = value_of(in.high);
#pragma unroll
  for (std::uint32_t p = 0; p < kPivots; ++p) {
    const float below = logf(light) * static_cast<float>(kPivots - p) / kPivots;  // Not a number, if `light` is none.
    pivots[p] = min(max(weighed_key(top + below), in.low + 1), in.high - 1);
  }
}

/// The largest key such that all above it, with what is attended anyway, hold `p` of the mass; kAll if the latter alone
/// does. `low` is the least key, less 1, `high` the largest, or a larger one of what is attended anyway. It ends when no
/// key lies between what is enough and what is not, and so is exact. A row sums what its threads find by `reduce`, the
/// same for all of them.
template <class Row>
__device__ std::uint32_t search(Row& row, const TopPRow& task, Interval in, std::uint32_t& turn) {
  row.weigh(in.high);
  std::uint32_t pivots[kPivots] = {in.low, in.low, in.low};
  float total = row.reduce(row.weights(pivots), turn++).of[0];
  float anyway = 0.f;
  if (task.end - task.begin != task.count) {
    Sums sums;
    for_each_anyway(row, task, [&](std::uint32_t key) {
      sums.of[0] += key != 0 ? weight_of(key, in.high, task.softcap) : 0.f;
    });
    anyway = row.reduce(sums, turn++).of[0];
    total += anyway;
  }
  const float need = task.p * total - anyway;
  if (anyway > 0.f && need <= 0.f) return kAll;
  if (in.open()) divide_by_value(in, (1.f - task.p) * total / static_cast<float>(task.count), pivots);
  while (in.open()) {
    const Sums sums = row.reduce(row.weights(pivots), turn++);
    std::uint32_t enough = 0;
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) enough |= (sums.of[p] >= need ? 1u : 0u) << p;
    in.narrow(pivots, enough);
    in.divide(pivots);
  }
  return in.low;
}

/// The least key from `low` on above which no more than `task.most` lie; above `high` none does. Of keys that are equal
/// all count, or none.
template <class Row>
__device__ std::uint32_t at_most(Row& row, const TopPRow& task, Interval in, std::uint32_t& turn) {
  const auto most = static_cast<float>(task.most);
  std::uint32_t pivots[kPivots] = {in.low, in.low, in.low};
  if (in.low >= in.high || row.reduce(row.counts(pivots), turn++).of[0] <= most) return in.low;
  while (in.open()) {
    in.divide(pivots);
    const Sums sums = row.reduce(row.counts(pivots), turn++);
    std::uint32_t more = 0;
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) more |= (sums.of[p] > most ? 1u : 0u) << p;
    in.narrow(pivots, more);
  }
  return in.high;
}

/// The largest key that is not kept; kAll if none is kept.
template <class Row>
__device__ std::uint32_t cut(Row& row, const TopPRow& task) {
  Range range = row.range();
  for_each_anyway(row, task, [&](std::uint32_t key) { range.largest = max(range.largest, key); });
  std::uint32_t turn = 0;
  range = row.reduce(range, turn++);
  if (range.least == kAll) return kAll;  // Nothing to choose from.
  Interval in{.low = range.least, .high = range.largest};
  if (task.p < 1.f) in.low = search(row, task, in, turn);
  return task.end - task.begin <= task.most ? in.low : at_most(row, task, in, turn);
}

}  // namespace sluice::gpu::top_p
