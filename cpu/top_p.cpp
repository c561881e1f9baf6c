#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "cpu/verbs.hpp"

namespace sluice::cpu {
namespace {

/// Unsigned keys in the order of the values; 0 for what is never kept. The two zeros are equal.
std::uint32_t order_key(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.f);
  const std::uint32_t key = (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
  return (bits & 0x7fff'ffffu) > 0x7f80'0000u || bits == 0xff80'0000u ? 0 : key;
}

struct Weighted {
  std::uint32_t key = 0;
  float weight = 0.f;
};

/// Up to here a sort beats adding up by digits.
constexpr std::size_t kFew = 256;

struct Digit {
  std::uint32_t shift;
  std::uint32_t bits;
};
constexpr Digit kDigits[] = {{21, 11}, {10, 11}, {0, 10}};

/// The largest key with which the weights of all keys from it on reach `need`. The weights of `pool` do, but for
/// rounding; it is reordered and shortened.
std::uint32_t threshold_key(std::vector<Weighted>& pool, double need) {
  double above = 0.0;
  for (const Digit digit : kDigits) {
    if (pool.size() <= kFew) break;
    std::array<double, 1u << 11> masses{};
    const std::uint32_t mask = (1u << digit.bits) - 1;
    for (const Weighted& one : pool) masses[(one.key >> digit.shift) & mask] += static_cast<double>(one.weight);
    std::uint32_t found = mask;
    for (std::uint32_t bucket = mask; bucket <= mask; --bucket) {
      if (masses[bucket] == 0.0) continue;
      found = bucket;
      if (above + masses[bucket] >= need) break;
      above += masses[bucket];
    }
    std::erase_if(pool, [&](const Weighted& one) { return ((one.key >> digit.shift) & mask) != found; });
  }
  std::sort(pool.begin(), pool.end(), [](const Weighted& a, const Weighted& b) { return a.key > b.key; });
  std::uint32_t key = pool.front().key;
  for (const Weighted& one : pool) {
    if (one.weight == 0.f) break;
    key = one.key;
    above += static_cast<double>(one.weight);
    if (above >= need) break;
  }
  return key;
}

}  // namespace

std::uint32_t select_top_p(const Kernels& kernels, std::span<const float> values, float p, std::uint32_t* mask) {
  thread_local std::vector<std::uint32_t> keys;
  thread_local std::vector<float> weights;
  thread_local std::vector<Weighted> pool;
  keys.resize(values.size());
  std::transform(values.begin(), values.end(), keys.begin(), order_key);
  std::fill_n(mask, div_up(values.size(), 32), 0u);
  const auto best = std::max_element(keys.begin(), keys.end());
  if (best == keys.end() || *best == 0) return 0;

  std::uint32_t threshold = 1;
  if (p < 1.f) {
    weights.resize(values.size());
    kernels.weigh(values.data(), values.size(), values[static_cast<std::size_t>(best - keys.begin())], weights.data());
    pool.clear();
    double total = 0.0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == 0) continue;
      pool.push_back({.key = keys[i], .weight = weights[i]});
      total += static_cast<double>(weights[i]);
    }
    threshold = threshold_key(pool, static_cast<double>(p) * total);
  }
  std::uint32_t kept = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t keep = keys[i] >= threshold ? 1u : 0u;
    mask[i / 32] |= keep << (i % 32);
    kept += keep;
  }
  return kept;
}

}  // namespace sluice::cpu
