// Which layers share blocks, and how many of these a sequence takes.
#include "scheduler/plan/layer_stacks.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/catch.hpp"

using namespace sluice;
using scheduler::LayerStacks;

namespace {

using Windows = std::vector<std::uint32_t>;

EngineOptions options_of(Windows windows, std::uint32_t layers) {
  EngineOptions options{.shape = {.layers = layers, .q_heads = 4, .kv_heads = 2, .head_dim = 64}};
  options.windows = std::move(windows);
  options.window_slack = 20;
  options.largest = {.decode_rows = 3, .prefill_rows = 50, .prefills = 1};
  options.in_flight = 2;
  options.import_rows = 10;
  return options;
}

}  // namespace

TEST_CASE("layers that see all tokens are one stack, and the others stacks of as many", "[plan]") {
  const LayerStacks none(options_of({}, 7)), zeros(options_of(Windows(7, 0), 7));
  for (const LayerStacks* stacks : {&none, &zeros})
    REQUIRE((stacks->count() == 1 && stacks->layers() == 7 && stacks->places() == nullptr && !stacks->windowed()));
  const LayerStacks all(options_of(Windows(7, 9), 7));
  REQUIRE((all.count() == 1 && all.layers() == 7 && all.windowed(0) && all.windowed_stacks() == 1));
  // Two of nine see everything: seven others in stacks of two.
  const Windows windows{8, 8, 0, 8, 8, 8, 0, 30, 8};
  const LayerStacks mixed(options_of(windows, 9));
  REQUIRE((mixed.count() == 5 && mixed.layers() == 2 && mixed.windowed_stacks() == 4));
  REQUIRE((!mixed.windowed(0) && mixed.windowed(1) && mixed.windowed(4)));
  std::set<std::pair<std::uint32_t, std::uint32_t>> taken;
  for (std::size_t layer = 0; layer < windows.size(); ++layer) {
    const ForwardLayerPlace place = mixed.places()[layer];
    REQUIRE((place.stack < 5 && place.at < 2));
    REQUIRE((place.stack == 0) == (windows[layer] == 0));
    REQUIRE(taken.insert({place.stack, place.at}).second);
  }
}

TEST_CASE("stacks with windows keep what is seen, and what may be taken back", "[plan]") {
  const LayerStacks stacks(options_of({30, 0, 8}, 3));
  REQUIRE(stacks.seen_from(10) == 0);
  REQUIRE(stacks.seen_from(29) == 0);
  REQUIRE(stacks.seen_from(30) == 1);  // Token 30 sees tokens 1 to 30.
  REQUIRE(stacks.passed_pages(64) == 0);
  REQUIRE(stacks.passed_pages(65) == 1);  // With 20 fewer the next one sees token 16 and those behind it.
  for (std::uint32_t tokens = 0; tokens < 2000; ++tokens) {
    const std::uint32_t kept = (tokens + 15) / 16 - std::min(stacks.passed_pages(tokens), (tokens + 15) / 16);
    REQUIRE(stacks.passed_pages(tokens) * 16 <= stacks.seen_from(tokens < 20 ? 0 : tokens - 20));
    const std::uint64_t pages = (tokens + 15) / 16;
    REQUIRE(pages - stacks.seen_from(tokens) / 16 >= std::min(pages, stacks.least_kept()));
    REQUIRE(kept <= stacks.most_kept());
  }
}

TEST_CASE("the longest sequence that blocks hold takes no more, and one that is longer does", "[plan]") {
  for (const Windows& windows : {Windows{}, Windows{30, 0, 8}, Windows{5, 0, 0}, Windows{100, 100, 100}}) {
    const LayerStacks stacks(options_of(windows, 3));
    for (std::uint64_t blocks = 0; blocks < 200; ++blocks) {
      const std::uint64_t pages = stacks.pages_in(blocks);
      CAPTURE(windows, blocks, pages);
      if (pages == ~std::uint64_t{0}) {
        REQUIRE(stacks.blocks(1'000'000) <= blocks);
        continue;
      }
      REQUIRE(stacks.blocks(pages) <= blocks);
      REQUIRE(stacks.blocks(pages + 1) > blocks);
    }
  }
}
