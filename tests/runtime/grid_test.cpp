// Which combinations of parameters the tests go through.
#include <array>
#include <set>

#include "tests/support/sanitized.hpp"

using namespace sluice::test;

TEST_CASE("every two values of two axes come together, and few combinations are enough for that", "[grid]") {
  using Sizes = std::vector<std::size_t>;
  for (const auto& [sizes, most] : {std::pair<Sizes, std::size_t>{{5, 3, 2, 5}, 26},
                                    {{8, 2, 2, 2}, 17},
                                    {{3, 3, 3, 2}, 11},
                                    {{4, 3, 3, 5}, 22},
                                    {{6, 3}, 18},
                                    {{7}, 7}}) {
    CAPTURE(sizes);
    std::set<std::array<std::size_t, 4>> pairs;
    std::size_t want = 0;
    for (std::size_t a = 0; a < sizes.size(); ++a)
      for (std::size_t b = a + 1; b < sizes.size(); ++b) want += sizes[a] * sizes[b];
    const auto combinations = detail::each_pair(sizes);
    for (const Sizes& places : combinations) {
      for (std::size_t a = 0; a < sizes.size(); ++a) {
        REQUIRE(places[a] < sizes[a]);
        for (std::size_t b = a + 1; b < sizes.size(); ++b) pairs.insert({a, b, places[a], places[b]});
      }
    }
    REQUIRE(pairs.size() == want);
    REQUIRE(combinations.size() <= most);
  }
}

TEST_CASE("every value comes where combinations are thinned to the longest axis", "[grid]") {
  const std::vector<std::size_t> sizes{5, 3, 2, 5};
  const auto combinations = detail::each_value(sizes);
  REQUIRE(combinations.size() == 5);
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    std::set<std::size_t> seen;
    for (const auto& places : combinations) seen.insert(places[axis]);
    REQUIRE(seen.size() == sizes[axis]);
  }
}
