// What the cases of any mix of forwards are held against, against float64.
#include <algorithm>
#include <span>

#include "tests/support/catch.hpp"
#include "tests/support/engine_mixes.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::mixes;

TEST_CASE("rows of chunks attend all that comes before them, and decoded rows what their policy says", "[engine]") {
  const EngineRig rig = engine_rig();
  const std::vector<Story> told = stories();
  const Alone rows = alone(rig, told);
  for (std::uint32_t s = 0; s < kStories; ++s) {
    for (std::uint32_t token = 0; token < kTokens; token += 3) {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const Story& story = told[s];
        const auto dense = story.attended(layer, token, kTokens, 1, 0);
        const auto six = story.attended(layer, token, 2, 3, 6);
        CAPTURE(s, token, layer);
        const auto off = [&](std::uint32_t way, const std::vector<double>& want) {
          return difference(std::span(rows.rows[s][way][token]).subspan(layer * kRow, kRow), want);
        };
        REQUIRE(off(0, six) < 1e-3);
        REQUIRE(off(1, story.attended(layer, token, 9, 1, 17)) < 1e-3);
        REQUIRE(off(2, story.attended(layer, token, 3, 8, 0)) < 1e-3);
        // The last token of the share may stand on its edge.
        REQUIRE(std::min(off(3, story.attended_by_mass(layer, token, 2, 3, 0.8 - 1e-5)),
                         off(3, story.attended_by_mass(layer, token, 2, 3, 0.8 + 1e-5))) < 1e-3);
        REQUIRE(off(4, layer == 0 ? dense : six) < 1e-3);
        REQUIRE(off(5, dense) < 1e-3);
        REQUIRE(off(kWays, dense) < 1e-3);
      }
    }
  }
}
