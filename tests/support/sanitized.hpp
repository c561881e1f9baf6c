#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
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

/// Whether the engine's cases run once more, with far rows of another type, which their parameters do not touch.
[[nodiscard]] inline bool runs_again() noexcept { return std::getenv("SLUICE_TEST_KV_DTYPE") != nullptr; }

/// A generator of every combination of the axes' values, as tuples. Under a sanitizer, and where cases run once more,
/// only of as many as the longest axis has values: each value of each axis still comes at least once. Axes of one length
/// are shifted by one or more.
///
///   const auto [near, rows] = GENERATE(grid(std::array{0u, 3u, 100u}, std::array{1u, 8u}));
template <class... T, std::size_t... kSizes>
[[nodiscard]] Catch::Generators::GeneratorWrapper<std::tuple<T...>> grid(const std::array<T, kSizes>&... axes) {
  const bool thinned = kSanitized || runs_again();
  const std::size_t count = thinned ? std::max({kSizes...}) : (kSizes * ...);
  std::vector<std::tuple<T...>> combinations;
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t rest = i;
    std::size_t shifted = i;
    const auto next = [&](std::size_t size) {
      return thinned ? shifted++ % size : std::exchange(rest, rest / size) % size;
    };
    combinations.push_back(std::tuple<T...>{axes[next(kSizes)]...});  // Braces evaluate from left to right.
  }
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
