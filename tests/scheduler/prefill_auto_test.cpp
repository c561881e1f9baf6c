// When PrefillMode::automatic chooses blocks: what it may lose, and what it wins.
#include "scheduler/prefill_auto.hpp"

#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr PrefillCosts kCosts{.per_chunk = 900.0, .per_key_block = 3.0, .per_pair = 0.007};
constexpr std::uint32_t kHeads = 32;

struct Outcome {
  double relative_time = 0.0;  ///< of dense attention's
  double chosen = 0.0;         ///< share of (layer, chunk) pairs
};

/// A prompt in chunks, whose choices keep a share of the pairs.
Outcome run(std::uint32_t tokens, std::uint32_t chunk, std::uint32_t layers, double keeps) {
  PrefillBets bets;
  std::vector<std::uint32_t> rest(layers);
  double time = 0.0, dense = 0.0, chosen = 0.0, all = 0.0;
  for (std::uint32_t first = 0; first < tokens; first += chunk) {
    const ChunkWork work{.first = first, .count = std::min(chunk, tokens - first)};
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      dense += work.pairs();
      ++all;
      if (!bets.bet(work, layer, layers, kCosts, rest[layer])) {
        time += work.pairs();
        continue;
      }
      ++chosen;
      time += kCosts.per_chunk + kCosts.per_key_block * work.key_blocks() +
              kCosts.per_pair * work.key_blocks() * work.query_blocks() + keeps * work.pairs();
      bets.settle(static_cast<std::uint64_t>(keeps * work.pairs() * kHeads),
                  static_cast<std::uint64_t>(work.pairs() * kHeads), kHeads, rest[layer]);
    }
  }
  return {time / dense, chosen / all};
}

}  // namespace

TEST_CASE("the work of a chunk counts blocks of the grid of positions", "[scheduler][prefill]") {
  REQUIRE(ChunkWork{.first = 0, .count = 128}.pairs() == 1.0);
  REQUIRE(ChunkWork{.first = 0, .count = 512}.pairs() == 10.0);
  REQUIRE(ChunkWork{.first = 512, .count = 256}.pairs() == 5.0 + 6.0);
  REQUIRE(ChunkWork{.first = 100, .count = 56}.query_blocks() == 2.0);  // It touches two blocks.
}

TEST_CASE("bets lose less than three percent, whatever the prompt", "[scheduler][prefill]") {
  const std::uint32_t tokens = GENERATE(2048u, 4096u, 8192u, 16384u, 32768u, 131072u, 262144u);
  const std::uint32_t chunk = GENERATE(1024u, 8192u, 262144u);
  const std::uint32_t layers = GENERATE(1u, 2u, 32u);
  const double keeps = GENERATE(1.0, 0.95, 0.86, 0.8);
  CAPTURE(tokens, chunk, layers, keeps);
  REQUIRE(run(tokens, chunk, layers, keeps).relative_time < 1.03);
}

TEST_CASE("bets are won where blocks can be left out", "[scheduler][prefill]") {
  REQUIRE(run(131072, 8192, 32, 0.12).chosen > 0.95);
  REQUIRE(run(131072, 8192, 32, 0.12).relative_time < 0.25);
  REQUIRE(run(16384, 8192, 32, 0.2).relative_time < 0.6);
  REQUIRE(run(16384, 16384, 32, 0.2).chosen == 1.0);
  REQUIRE(run(2048, 2048, 32, 0.2).chosen == 0.0);  // A choice would take longer than dense attention.
}

TEST_CASE("a layer that lost rests for some chunks", "[scheduler][prefill]") {
  PrefillBets bets;
  std::uint32_t rest = 0;
  const ChunkWork work{.first = 120000, .count = 8192};
  REQUIRE(bets.bet(work, 0, 32, kCosts, rest));
  bets.settle(95, 100, 1, rest);
  REQUIRE(rest > 0);
  for (std::uint32_t chunks = rest; chunks > 0; --chunks) REQUIRE_FALSE(bets.bet(work, 0, 32, kCosts, rest));
  REQUIRE(rest == 0);
  REQUIRE(bets.bet(work, 0, 32, kCosts, rest));
}
