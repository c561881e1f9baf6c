#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "sluice/page_rules.hpp"
#include "sluice/step/partial.hpp"

namespace sluice {

/// One query head of a progressive attention (PSA, arXiv 2503.00392, algorithm 1). Masses are sums of exponentials of
/// scaled scores, kept as natural logarithms: nothing overflows, and what weighs next to nothing still weighs
/// something.
struct ProgressState {
  float mass = kEmptyLse;                                 ///< log of what was attended
  float unseen = std::numeric_limits<float>::infinity();  ///< log of what a page not seen yet is taken to weigh
  friend bool operator==(const ProgressState&, const ProgressState&) = default;
};

/// The masses of one microbatch as one query head sees them.
struct PageMasses {
  const float* first = nullptr;  ///< log masses, `stride` apart; a NaN weighs nothing
  std::uint32_t pages = 0;
  std::uint32_t full = 0;  ///< the first `full` have all their tokens; the others say nothing of pages to come
  std::uint32_t stride = 1;

  [[nodiscard]] float operator[](std::uint32_t page) const noexcept { return first[std::size_t{page} * stride]; }
};

namespace detail {

/// Log of the sum of exponentials of the first `pages` masses, and how many are numbers.
struct MassSum {
  float log = kEmptyLse;
  std::uint32_t count = 0;
};
[[nodiscard]] inline MassSum sum_masses(const PageMasses& masses, std::uint32_t pages) noexcept {
  MassSum sum;
  float top = kEmptyLse;
  for (std::uint32_t i = 0; i < pages; ++i) top = masses[i] > top ? masses[i] : top;  // False for NaN.
  float total = 0.f;
  for (std::uint32_t i = 0; i < pages; ++i) {
    if (std::isnan(masses[i])) continue;
    ++sum.count;
    total += masses[i] == top ? 1.f : std::exp(masses[i] - top);  // Both may be infinite.
  }
  if (top != kEmptyLse) sum.log = top + std::log(total);
  return sum;
}

/// The element that as many are below as above; of two the larger. NaN if there is none.
[[nodiscard]] inline float upper_median(const PageMasses& masses, std::uint32_t count) noexcept {
  for (std::uint32_t i = 0; i < masses.full; ++i) {
    std::uint32_t below = 0;
    std::uint32_t equal = 0;
    for (std::uint32_t j = 0; j < masses.full; ++j) {
      below += masses[j] < masses[i] ? 1 : 0;
      equal += masses[j] == masses[i] ? 1 : 0;
    }
    if (below <= count / 2 && count / 2 < below + equal) return masses[i];
  }
  return std::numeric_limits<float>::quiet_NaN();
}

}  // namespace detail

/// Adds to what was attended.
inline void add_mass(ProgressState& state, float log_mass) noexcept {
  if (std::isnan(log_mass)) return;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool infinite = state.mass == kInfinity || log_mass == kInfinity;  // Infinity less infinity is no number.
  state.mass = infinite ? kInfinity : merge_weights(state.mass, log_mass).lse;
}

/// Adds a microbatch, and learns from it what a page to come may weigh.
inline void add_pages(ProgressState& state, ProgressRule rule, const PageMasses& masses) noexcept {
  add_mass(state, detail::sum_masses(masses, masses.pages).log);
  const detail::MassSum full = detail::sum_masses(masses, masses.full);
  if (full.count == 0) return;
  switch (rule) {
    case ProgressRule::least:
    case ProgressRule::certified:
      for (std::uint32_t i = 0; i < masses.full; ++i)
        state.unseen = masses[i] < state.unseen ? masses[i] : state.unseen;
      return;
    case ProgressRule::mean: state.unseen = full.log - std::log(static_cast<float>(full.count)); return;
    case ProgressRule::median: state.unseen = detail::upper_median(masses, full.count); return;
  }
}

/// P = A / (A + unseen * left): the share of the softmax mass that was attended, if `left` pages weigh `unseen` each,
/// and at most A / (A + bound) for a log `bound` of what they weigh together. Exactly 1 if no page is left.
[[nodiscard]] inline float progress_share(const ProgressState& state, std::uint32_t left,
                                          float bound = kEmptyLse) noexcept {
  if (left == 0) return 1.f;
  if (!(state.mass > kEmptyLse)) return 0.f;
  const float guess = state.unseen + std::log(static_cast<float>(left));
  const float rest = bound > guess ? bound : guess;
  if (rest == kEmptyLse) return 1.f;
  const float share = 1.f / (1.f + std::exp(rest - state.mass));
  return std::isnan(share) || std::isnan(bound) ? 0.f : share;
}

/// Whether a share is enough. All of the mass is never enough as long as pages are left, however little they weigh.
[[nodiscard]] inline bool passes(float share, float mass, std::uint32_t left) noexcept {
  return left == 0 || (share >= mass && mass < 1.f);
}

}  // namespace sluice
