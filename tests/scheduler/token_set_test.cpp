#include "scheduler/token_set.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "scheduler/fast_exp.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

using sluice::scheduler::fast_exp;
using sluice::scheduler::TokenSet;
using sluice::scheduler::test::members;

TEST_CASE("a token set behaves like a sorted set, also when it is reused", "[token_set]") {
  TokenSet set, other;
  std::mt19937 rng(2);
  for (const std::uint32_t room : {1u, 64u, 65u, 5000u, 70000u}) {
    CAPTURE(room);
    set.reset(room);
    other.reset(room);
    REQUIRE(members(set).empty());
    std::set<std::uint32_t> expected;
    for (int i = 0; i < 200; ++i) {
      const auto token = static_cast<std::uint32_t>(rng() % room);
      set.add(token);
      expected.insert(token);
    }
    const auto begin = static_cast<std::uint32_t>(rng() % room);
    const auto end = std::min(room, begin + static_cast<std::uint32_t>(rng() % 300));
    set.add_range(begin, end);
    for (std::uint32_t t = begin; t < end; ++t) expected.insert(t);
    for (int i = 0; i < 50 && room > 4; ++i) {
      const auto at = static_cast<std::uint32_t>(rng() % (room - 3));
      const auto bits = static_cast<std::uint32_t>(rng() % 16);
      other.add_bits(at, bits);
      for (std::uint32_t b = 0; b < 4; ++b) {
        if (((bits >> b) & 1) != 0) expected.insert(at + b);
      }
    }
    set.unite(other);
    REQUIRE(members(set) == std::vector<std::uint32_t>(expected.begin(), expected.end()));
    REQUIRE(set.size() == expected.size());
    for (std::uint32_t t = 0; t < room; t += 1 + room / 500) REQUIRE(set.contains(t) == (expected.count(t) == 1));
  }
}

TEST_CASE("fast_exp is exp to float32's accuracy below zero, and 0 where exp vanishes", "[fast_exp]") {
  for (int i = 0; i <= 87000; ++i) {
    const float x = -static_cast<float>(i) / 1000.f;
    if (x <= -87.f) continue;
    REQUIRE(std::abs(fast_exp(x) / std::exp(static_cast<double>(x)) - 1.0) < 3e-7);
  }
  REQUIRE(fast_exp(0.f) == 1.f);
  REQUIRE(fast_exp(-87.5f) == 0.f);
  REQUIRE(fast_exp(-std::numeric_limits<float>::infinity()) == 0.f);
  REQUIRE(fast_exp(std::numeric_limits<float>::quiet_NaN()) == 0.f);
}
