#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

/// Top-p (Twilight, arXiv 2502.02770, sections 4.1 and 4.2) of one query head in one step, on the host and on devices.
///
/// What is weighed: the head's candidates and what is attended anyway, which is the sinks, the recent window and, where
/// policies of the CPU estimate, the candidates of the newest page, of which they have no 4-bit copy. Scores are
/// estimates where there is a copy, exact elsewhere; weights are the softmax over all of them. As in the paper, the
/// share is one of all that the head may attend, the newest token included.
///
/// What is attended anyway counts first. Of the other candidates the fewest are kept, heaviest first, with which the
/// sum of weights is at least p of the whole; and all that equal the lightest of them. If what is attended anyway
/// suffices, none are kept. NaN and -infinity have no weight.
///
/// Candidates that happen to be near are weighed like all others, and do not count first: which are depends on near
/// memory and on other sequences, what is selected on policy, sequence and step alone.
namespace sluice {

/// A candidate as top-p sees it: an order-preserving image of its score, and its softmax weight on any scale.
struct Weighed {
  std::uint32_t key = 0;
  float weight = 0.f;
};

namespace detail {

/// Up to here a sort beats adding up by digits.
inline constexpr std::size_t kFewWeighed = 256;

/// Digits of a key, from the top.
struct KeyDigit {
  std::uint32_t shift;
  std::uint32_t bits;
};
inline constexpr KeyDigit kKeyDigits[] = {{21, 11}, {10, 11}, {0, 10}};

/// Leaves those candidates whose digit is that of the cut; `above` becomes the weight of those with larger ones. One
/// pass without comparisons, where sorting algorithms mispredict.
inline void narrow(std::vector<Weighed>& pool, const KeyDigit& digit, double need, double& above) {
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

}  // namespace detail

/// Above the key of any score.
inline constexpr std::uint32_t kKeepNone = ~0u;

/// The largest key such that the candidates from it on, with what is attended anyway, hold `share` of the weight; with
/// share >= 1 the least key, and kKeepNone if what is attended anyway suffices. The order of `pool` does not matter, up
/// to the rounding of sums in float64; it is reordered and shortened.
/// @param pool    candidates that are not attended anyway; not empty
/// @param anyway  weight of what is, on the same scale
[[nodiscard]] inline std::uint32_t top_p_cut(std::vector<Weighed>& pool, double share, double anyway = 0.0) {
  if (share >= 1.0) {
    return std::min_element(pool.begin(), pool.end(), [](const Weighed& a, const Weighed& b) { return a.key < b.key; })
        ->key;
  }
  double total = anyway;
  for (const Weighed& one : pool) total += static_cast<double>(one.weight);
  const double need = share * total;
  if (anyway > 0.0 && anyway >= need) return kKeepNone;
  double above = anyway;
  for (const detail::KeyDigit& digit : detail::kKeyDigits) {
    if (pool.size() > detail::kFewWeighed) detail::narrow(pool, digit, need, above);
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

}  // namespace sluice
