#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "cpu/backend/verbs.hpp"
#include "sluice/order_key.hpp"

namespace sluice::cpu {
namespace {

/// Unsigned keys in the order of the values: NaN is 0, below -infinity; the two zeros are equal.
std::uint32_t order_key(float value) noexcept {
  return value == value ? order_key_of_number(value) : 0u;
}

constexpr std::uint32_t kBucketBits = 11;
constexpr std::uint32_t kBuckets = 1u << kBucketBits;
constexpr std::uint32_t kBucketShift = 32 - kBucketBits;

/// Up to here a partition beats counting into buckets.
constexpr std::uint32_t kFew = 1024;

/// The rank-th largest key, rank >= 1. Reorders `keys`.
std::uint32_t partition_rank(std::vector<std::uint32_t>& keys, std::uint32_t rank) {
  const auto nth = keys.begin() + (rank - 1);
  std::nth_element(keys.begin(), nth, keys.end(), std::greater<>{});
  return *nth;
}

/// The same for long rows, in two passes over them: count the keys by their sign, exponent and first two bits
/// of mantissa, then look only into the bucket where the rank falls.
std::uint32_t bucket_rank(const std::vector<std::uint32_t>& keys, std::uint32_t rank, std::vector<std::uint32_t>& few) {
  std::array<std::uint32_t, kBuckets> counts{};
  for (const std::uint32_t key : keys) ++counts[key >> kBucketShift];
  std::uint32_t bucket = kBuckets - 1;
  while (counts[bucket] < rank) rank -= counts[bucket--];
  few.clear();
  for (const std::uint32_t key : keys) {
    if (key >> kBucketShift == bucket) few.push_back(key);
  }
  return partition_rank(few, rank);
}

}  // namespace

std::uint32_t select_top_k(const float* values, std::uint32_t count, std::uint32_t k, std::uint32_t* out) {
  k = std::min(k, count);
  if (k == 0) return 0;
  thread_local std::vector<std::uint32_t> keys;
  thread_local std::vector<std::uint32_t> few;
  keys.resize(count);
  std::transform(values, values + count, keys.begin(), order_key);
  std::uint32_t threshold = 0;
  if (count <= kFew) {
    few = keys;
    threshold = partition_rank(few, k);
  } else {
    threshold = bucket_rank(keys, k, few);
  }
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

}  // namespace sluice::cpu
