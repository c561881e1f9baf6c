#include "scheduler/top_p.hpp"

#include <algorithm>
#include <array>

namespace sluice::scheduler {
namespace {

/// Up to here a sort beats adding up by digits.
constexpr std::size_t kFew = 256;

/// Digits of a key, from the top.
struct Digit {
  std::uint32_t shift;
  std::uint32_t bits;
};
constexpr Digit kDigits[] = {{21, 11}, {10, 11}, {0, 10}};

/// Leaves those candidates whose digit is that of the cut; `above` becomes the weight of those with larger ones. One
/// pass without comparisons, where sorting algorithms mispredict.
void narrow(std::vector<Weighed>& pool, const Digit& digit, double need, double& above) {
  const std::uint32_t mask = (1u << digit.bits) - 1;
  std::array<double, 1u << 11> masses{};
  for (const Weighed& one : pool) masses[(one.key >> digit.shift) & mask] += static_cast<double>(one.weight);
  std::uint32_t found = mask;
  for (std::uint32_t i = 0; i <= mask; ++i) {
    const std::uint32_t bin = mask - i;
    if (masses[bin] == 0.0) continue;
    found = bin;
    if (above + masses[bin] >= need) break;
    above += masses[bin];
  }
  std::erase_if(pool, [&](const Weighed& one) { return ((one.key >> digit.shift) & mask) != found; });
}

}  // namespace

std::uint32_t top_p_cut(std::vector<Weighed>& pool, double share) {
  if (share >= 1.0) {
    return std::min_element(pool.begin(), pool.end(), [](const Weighed& a, const Weighed& b) { return a.key < b.key; })
        ->key;
  }
  double total = 0.0;
  for (const Weighed& one : pool) total += static_cast<double>(one.weight);
  const double need = share * total;
  double above = 0.0;
  for (const Digit& digit : kDigits) {
    if (pool.size() > kFew) narrow(pool, digit, need, above);
  }
  std::sort(pool.begin(), pool.end(), [](const Weighed& a, const Weighed& b) { return a.key > b.key; });
  std::uint32_t key = pool.front().key;
  for (const Weighed& one : pool) {
    if (one.weight == 0.f) break;  // Rounding, or all of the weight is above.
    key = one.key;
    above += static_cast<double>(one.weight);
    if (above >= need) break;
  }
  return key;
}

}  // namespace sluice::scheduler
