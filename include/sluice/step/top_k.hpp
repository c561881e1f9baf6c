#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

/// The largest of a row, on the host: of scores of tokens, of pages.
namespace sluice {
namespace detail {

/// Unsigned keys in the order of the values: NaN is 0, below -infinity; the two zeros are equal. In integers without
/// branches, so that many of them are made at a time.
inline std::uint32_t top_k_key(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto size = static_cast<std::int32_t>(bits & 0x7fff'ffffu);
  const std::int32_t sign = static_cast<std::int32_t>(bits) >> 31;
  const auto key = 0x8000'0000u + static_cast<std::uint32_t>((size ^ sign) - sign);
  return size > 0x7f80'0000 ? 0u : key;
}

inline constexpr std::uint32_t kTopKBucketBits = 11;
inline constexpr std::uint32_t kTopKBuckets = 1u << kTopKBucketBits;
inline constexpr std::uint32_t kTopKBucketShift = 32 - kTopKBucketBits;

/// Up to here a partition of all beats looking for those that may be among the largest.
inline constexpr std::uint32_t kFewRanked = 512;

/// The rank-th largest key, rank >= 1. Reorders `keys`.
inline std::uint32_t partition_rank(std::vector<std::uint32_t>& keys, std::uint32_t rank) {
  const auto nth = keys.begin() + (rank - 1);
  std::nth_element(keys.begin(), nth, keys.end(), std::greater<>{});
  return *nth;
}

/// Values whose keys are made at a time, which vectorises, and looked at one by one only if some of them may count.
inline constexpr std::uint32_t kTopKChunk = 64;

/// f(first, keys, count) for every chunk of the values.
template <class F>
void for_each_chunk(const float* values, std::uint32_t count, const F& f) {
  std::uint32_t keys[kTopKChunk];
  for (std::uint32_t first = 0; first < count; first += kTopKChunk) {
    const std::uint32_t some = std::min(kTopKChunk, count - first);
    std::transform(values + first, values + first + some, keys, top_k_key);
    f(first, keys, some);
  }
}

/// A key that the k-th largest is not below: the lower end of its bucket, as counted by sign, exponent and first two
/// bits of mantissa.
inline std::uint32_t counted_floor(const float* values, std::uint32_t count, std::uint32_t k) {
  std::array<std::array<std::uint32_t, kTopKBuckets>, 2> counts{};  // Neighbours are often alike: they count apart.
  for_each_chunk(values, count, [&](std::uint32_t, const std::uint32_t* keys, std::uint32_t some) {
    for (std::uint32_t i = 0; i < some; ++i) ++counts[i % 2][keys[i] >> kTopKBucketShift];
  });
  std::uint32_t bucket = kTopKBuckets - 1;
  for (std::uint32_t left = k; counts[0][bucket] + counts[1][bucket] < left; --bucket)
    left -= counts[0][bucket] + counts[1][bucket];
  return bucket << kTopKBucketShift;
}

/// A key that the k-th largest is most likely not below, by a sample: four deviations below where it should be.
inline std::uint32_t sampled_floor(const float* values, std::uint32_t count, std::uint32_t k) {
  constexpr std::uint32_t kSamples = 512;
  std::array<std::uint32_t, kSamples> keys;
  for (std::uint32_t i = 0; i < kSamples; ++i) keys[i] = top_k_key(values[std::uint64_t{i} * count / kSamples]);
  const double mean = static_cast<double>(k) * kSamples / count;
  const auto rank = static_cast<std::uint32_t>(mean + 4.0 * std::sqrt(mean) + 2.0);
  if (rank > kSamples) return 0;
  std::nth_element(keys.begin(), keys.begin() + (rank - 1), keys.end(), std::greater<>{});
  return keys[rank - 1];
}

using RankedPlaces = std::vector<std::pair<std::uint32_t, std::uint32_t>>;  // (index, key)

/// Which of kTopKChunk keys reach the floor, a bit each: compared as vectors, whose bytes of ones are then gathered
/// eight at a time by a product.
inline std::uint64_t reaching(const std::uint32_t* keys, std::uint32_t floor) {
  constexpr std::uint64_t kGather = 0x0102'0408'1020'4080u;
  std::array<std::uint8_t, kTopKChunk> reach;
  for (std::uint32_t i = 0; i < kTopKChunk; ++i) reach[i] = keys[i] >= floor ? 1 : 0;
  std::uint64_t mask = 0;
  for (std::uint32_t i = 0; i < kTopKChunk; i += 8) {
    std::uint64_t eight = 0;
    for (std::uint32_t byte = 0; byte < 8; ++byte) eight |= std::uint64_t{reach[i + byte]} << 8 * byte;
    mask |= (eight * kGather >> 56) << i;
  }
  return mask;
}

inline void reach(const float* values, std::uint32_t count, std::uint32_t floor, RankedPlaces& reached) {
  reached.clear();
  for_each_chunk(values, count, [&](std::uint32_t first, std::uint32_t* keys, std::uint32_t some) {
    std::fill(keys + some, keys + kTopKChunk, 0u);
    std::uint64_t mask = reaching(keys, floor);
    if (some < kTopKChunk) mask &= (std::uint64_t{1} << some) - 1;
    for (; mask != 0; mask &= mask - 1) {  // Few, of a floor that is near the k-th largest.
      const auto i = static_cast<std::uint32_t>(std::countr_zero(mask));
      reached.emplace_back(first + i, keys[i]);
    }
  });
}

/// The largest of a long row: those that reach a floor are put aside, and the best of these found. The floor is a
/// guess, and counted where it was too high or would not leave much out.
inline std::uint32_t top_k_of_long(const float* values, std::uint32_t count, std::uint32_t k, std::uint32_t* out) {
  constexpr std::uint32_t kSparse = 8;
  thread_local RankedPlaces reached;
  reached.clear();
  if (k <= count / kSparse) reach(values, count, sampled_floor(values, count, k), reached);
  if (reached.size() < k) reach(values, count, counted_floor(values, count, k), reached);
  thread_local std::vector<std::uint32_t> keys;
  keys.clear();
  for (const auto& [index, key] : reached) keys.push_back(key);
  const std::uint32_t threshold = partition_rank(keys, k);
  const auto above = std::count_if(keys.begin(), keys.end(), [&](std::uint32_t key) { return key > threshold; });
  auto ties = k - static_cast<std::uint32_t>(above);
  for (const auto& [index, key] : reached) {
    const bool tie = key == threshold && ties > 0;
    if (key <= threshold && !tie) continue;
    if (tie) --ties;
    *out++ = index;
  }
  return k;
}

}  // namespace detail

/// The indices of the largest min(k, count) of `values`, ascending, to `out`; returns how many. The two zeros are
/// equal, NaN is below -infinity, and of those that equal the last one the first are taken. With scratch memory of the
/// thread.
inline std::uint32_t select_top_k(const float* values, std::uint32_t count, std::uint32_t k, std::uint32_t* out) {
  k = std::min(k, count);
  if (k == 0) return 0;
  if (count > detail::kFewRanked) return detail::top_k_of_long(values, count, k, out);
  thread_local std::vector<std::uint32_t> keys;
  thread_local std::vector<std::uint32_t> few;
  keys.resize(count);
  std::transform(values, values + count, keys.begin(), detail::top_k_key);
  few = keys;
  const std::uint32_t threshold = detail::partition_rank(few, k);
  const auto above = [threshold](std::uint32_t key) { return key > threshold; };
  auto ties = k - static_cast<std::uint32_t>(std::count_if(keys.begin(), keys.end(), above));
  for (std::uint32_t i = 0, found = 0; found < k; ++i) {
    const bool tie = keys[i] == threshold && ties > 0;
    if (!above(keys[i]) && !tie) continue;
    if (tie) --ties;
    out[found++] = i;
  }
  return k;
}

}  // namespace sluice
