// How scores of keys are cut into thread blocks: no GPU is needed to say so.
#include <algorithm>
#include <limits>
#include <vector>

#include "gpu/kernels/select/score_cut.hpp"
#include "sluice/units.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using gpu::score_int4::Cut;
using gpu::score_int4::cut_of;
using gpu::score_int4::kBlockTokens;
using gpu::score_int4::kMostChunks;

namespace {

constexpr std::uint32_t kMultiprocessors = 132;
constexpr std::uint32_t kRoom = 2 * kMultiprocessors;

/// What a launch takes in which each row has so many thread blocks.
std::uint64_t turns_of(std::uint64_t rows, std::uint32_t tokens, std::uint64_t blocks) {
  return div_up(rows * blocks, kRoom) * (div_up(div_up(tokens, kBlockTokens), blocks) + 3);
}

}  // namespace

TEST_CASE("a cut has all tokens, in as few turns as thread blocks that run at once can do", "[score]") {
  for (const std::uint32_t rows : {1u, 2u, 8u, 16u, 24u, 32u, 40u, 56u, 64u, 256u, 264u, 265u, 300u, 1000u}) {
    for (const std::uint32_t tokens : {1u, 255u, 256u, 257u, 8448u, 33'024u, 131'328u, 524'544u, 1'048'832u}) {
      CAPTURE(rows, tokens);
      const Cut cut = cut_of(rows, tokens, kRoom);
      const std::uint64_t chunks = div_up(tokens, kBlockTokens);
      REQUIRE(cut.blocks != 0);
      REQUIRE(std::uint64_t{cut.blocks} * cut.chunks >= chunks);
      REQUIRE(cut.blocks <= chunks);
      REQUIRE(cut.chunks <= kMostChunks);
      REQUIRE(cut.turns >= turns_of(rows, tokens, cut.blocks));
      std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
      for (std::uint64_t blocks = div_up(chunks, kMostChunks); blocks <= chunks; ++blocks)
        least = std::min(least, turns_of(rows, tokens, blocks));
      REQUIRE(20 * cut.turns <= 21 * least);
    }
  }
}

TEST_CASE("beside one more thread block for each row there is room for at least one that scores", "[score]") {
  for (std::uint32_t multiprocessors = 1; multiprocessors <= 160; ++multiprocessors) {
    for (const std::uint32_t heads : {1u, 2u, 8u, 28u, 32u, 40u, 48u, 64u, 128u})
      REQUIRE(gpu::score_int4::room_beside(heads, multiprocessors) >= heads);
  }
}
