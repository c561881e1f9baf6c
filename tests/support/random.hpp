#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace sluice::test {

/// SplitMix64: the same numbers on every platform and standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  std::uint64_t next() noexcept {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [0, limit); limit > 0.
  std::uint32_t below(std::uint32_t limit) noexcept { return static_cast<std::uint32_t>(next() % limit); }
  /// In [0, 1).
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  double normal() noexcept {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  std::uint64_t state_;
};

}  // namespace sluice::test
