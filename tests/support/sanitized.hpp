#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/catch.hpp"

namespace sluice::test {

/// Built with a sanitizer, under which everything takes ten times as long. Tests that go through every combination of
/// their parameters leave out there what touches the same code in the same order.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
/// By the thread sanitizer, which looks for the order of what threads do, and not at what comes of it: tests go through
/// fewer values yet.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

/// Whether the engine's cases run once more, with far rows of another type, which their parameters do not touch.
[[nodiscard]] inline bool runs_again() noexcept { return std::getenv("SLUICE_TEST_KV_DTYPE") != nullptr; }

namespace detail {

/// Places of combinations that `sizes` has: as many as the longest axis has values, each of which comes at least once.
/// Axes of one length are shifted by one or more. Of the thread sanitizer only the first two.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> each_value(const std::vector<std::size_t>& sizes) {
  const std::size_t count = std::min(std::ranges::max(sizes), kThreadSanitized ? std::size_t{2} : ~std::size_t{0});
  std::vector<std::vector<std::size_t>> taken(count, std::vector<std::size_t>(sizes.size()));
  for (std::size_t i = 0; i < taken.size(); ++i) {
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) taken[i][axis] = (i + axis) % sizes[axis];
  }
  return taken;
}

/// Likewise of so many combinations that each two values of any two axes come together at least once: of all there are,
/// always the first of those that bring most new pairs.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> each_pair(const std::vector<std::size_t>& sizes) {
  std::vector<std::vector<std::size_t>> all(1, std::vector<std::size_t>(sizes.size()));
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    const std::size_t before = all.size();
    for (std::size_t value = 1; value < sizes[axis]; ++value) {
      for (std::size_t i = 0; i < before; ++i) {
        all.push_back(all[i]);
        all.back()[axis] = value;
      }
    }
  }
  if (sizes.size() < 3) return all;
  std::set<std::array<std::size_t, 4>> seen;
  const auto pairs_of = [](const std::vector<std::size_t>& places) {
    std::vector<std::array<std::size_t, 4>> pairs;
    for (std::size_t a = 0; a < places.size(); ++a)
      for (std::size_t b = a + 1; b < places.size(); ++b) pairs.push_back({a, b, places[a], places[b]});
    return pairs;
  };
  std::vector<std::vector<std::size_t>> taken;
  for (;;) {
    std::size_t best = 0, most = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto pairs = pairs_of(all[i]);
      const auto fresh = static_cast<std::size_t>(
          std::ranges::count_if(pairs, [&](const auto& pair) { return !seen.contains(pair); }));
      if (fresh > most) best = i, most = fresh;
    }
    if (most == 0) return taken;
    for (const auto& pair : pairs_of(all[best])) seen.insert(pair);
    taken.push_back(all[best]);
  }
}

}  // namespace detail

/// A generator of combinations of the axes' values, as tuples: each two values of any two axes come together. Under a
/// sanitizer, and where cases run once more, each value comes once; under the thread sanitizer two combinations do.
/// What needs every combination has a GENERATE for each axis.
///
///   const auto [near, rows] = GENERATE(grid(std::array{0u, 3u, 100u}, std::array{1u, 8u}));
template <class... T, std::size_t... kSizes>
[[nodiscard]] Catch::Generators::GeneratorWrapper<std::tuple<T...>> grid(const std::array<T, kSizes>&... axes) {
  const std::vector<std::size_t> sizes{kSizes...};
  std::vector<std::tuple<T...>> combinations;
  const auto add = [&]<std::size_t... kAxes>(const auto& places, std::index_sequence<kAxes...>) {
    combinations.push_back(std::tuple<T...>{axes[places[kAxes]]...});
  };
  for (const auto& places : kSanitized || runs_again() ? detail::each_value(sizes) : detail::each_pair(sizes))
    add(places, std::index_sequence_for<T...>{});
  return Catch::Generators::from_range(combinations);
}

/// An axis of these values; under a sanitizer only of the first `kFew`, so those come first that differ most.
template <std::size_t kFew, class T, std::size_t kSize>
[[nodiscard]] constexpr auto few(const std::array<T, kSize>& values) {
  std::array<T, kSanitized ? std::min(kFew, kSize) : kSize> taken{};
  std::copy_n(values.begin(), taken.size(), taken.begin());
  return taken;
}

}  // namespace sluice::test
