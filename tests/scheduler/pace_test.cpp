// How long forwards take, and how long a chunk may be beside rows that decode: held against times made by a formula.
#include "scheduler/admission/pace.hpp"

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/catch.hpp"

using namespace sluice::scheduler;

namespace {

/// A machine whose forwards take as long as a formula says, and a little longer by chance.
struct Machine {
  double base = 0.004, decode = 0.0002, token = 0.00005, pair = 2e-9;
  double noise = 0.0;  ///< of the time, at most
  std::mt19937 random{7};

  double seconds(const PacedForward& forward) {
    const double exact =
        base + decode * forward.decode_rows + token * forward.chunk_tokens + pair * forward.chunk_pairs;
    return exact * (1.0 + noise * std::uniform_real_distribution<double>(0.0, 1.0)(random));
  }
};

PacedForward forward_of(std::uint32_t rows, std::uint32_t first, std::uint32_t tokens) {
  return {.decode_rows = rows, .chunk_tokens = tokens, .chunk_pairs = PacedForward::pairs(first, tokens)};
}

/// A prompt of `tokens` tokens is read beside `rows` that decode, as the pace says. Returns the longest forward after
/// the first ten, over one without a chunk.
double worst_slowdown(Machine& machine, Pace& pace, std::uint32_t rows, std::uint32_t tokens, double slowdown) {
  const double alone = machine.seconds(forward_of(rows, 0, 0));
  double worst = 0.0;
  int turn = 0;
  for (std::uint32_t first = 0; first < tokens; ++turn) {
    const std::uint32_t count = std::min(pace.chunk({.decode_rows = rows}, first, 16, 2048, slowdown), tokens - first);
    REQUIRE(count >= 1);
    const PacedForward forward = forward_of(rows, first, count);
    const double seconds = machine.seconds(forward);
    pace.observe(forward, seconds);
    if (turn >= 10 && count > 16) worst = std::max(worst, seconds / alone);
    first += count;
  }
  return worst;
}

}  // namespace

TEST_CASE("causal pairs of a chunk") {
  REQUIRE(PacedForward::pairs(0, 1) == 1.0);
  REQUIRE(PacedForward::pairs(0, 4) == 1.0 + 2.0 + 3.0 + 4.0);
  REQUIRE(PacedForward::pairs(10, 2) == 11.0 + 12.0);
  REQUIRE(PacedForward::pairs(10, 0) == 0.0);
}

TEST_CASE("a pace that knows nothing begins with a small chunk") {
  const Pace pace;
  REQUIRE(pace.seconds(forward_of(1, 0, 64)) == 0.0);
  REQUIRE(pace.chunk({.decode_rows = 1}, 0, 16, 2048, 2.0) == Pace::kFirstChunk);
  REQUIRE(pace.chunk({.decode_rows = 1}, 0, 16, 32, 2.0) == 32);
  REQUIRE(pace.chunk({.decode_rows = 1}, 0, 256, 2048, 2.0) == 256);
  REQUIRE(pace.chunk({.decode_rows = 0}, 0, 16, 2048, 2.0) == 2048);  // Nobody waits.
}

TEST_CASE("a pace finds the times of a machine without noise") {
  Machine machine;
  Pace pace;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const PacedForward forward = forward_of(1 + i % 8, 1000 * (i % 5), 64 * (i % 4));
    pace.observe(forward, machine.seconds(forward));
  }
  for (const PacedForward& forward : {forward_of(3, 0, 0), forward_of(8, 4000, 512), forward_of(1, 100'000, 512)})
    REQUIRE(pace.seconds(forward) == Approx(machine.seconds(forward)).epsilon(0.02));
}

TEST_CASE("beside rows that decode a prompt's forwards keep to the slowdown, and use it") {
  for (const double noise : {0.0, 0.1}) {
    for (const std::uint32_t rows : {1u, 8u, 64u}) {
      CAPTURE(noise, rows);
      Machine machine{.noise = noise};
      Pace pace;
      for (int i = 0; i < 8; ++i) pace.observe(forward_of(rows, 0, 0), machine.seconds(forward_of(rows, 0, 0)));
      const double worst = worst_slowdown(machine, pace, rows, 60'000, 2.0);
      REQUIRE(worst <= 2.0 * (1.0 + noise) + 0.05);
      REQUIRE(worst >= 1.7);
    }
  }
}

TEST_CASE("chunks become smaller the more tokens lie before them") {
  Machine machine{.pair = 2e-8};
  Pace pace;
  for (int i = 0; i < 8; ++i) pace.observe(forward_of(4, 0, 0), machine.seconds(forward_of(4, 0, 0)));
  (void)worst_slowdown(machine, pace, 4, 50'000, 2.0);
  const std::uint32_t early = pace.chunk({.decode_rows = 4}, 0, 1, 2048, 2.0);
  const std::uint32_t late = pace.chunk({.decode_rows = 4}, 50'000, 1, 2048, 2.0);
  REQUIRE(early > 2 * late);
  REQUIRE(pace.chunk({.decode_rows = 4}, 10'000'000, 16, 2048, 2.0) == 16);  // Prompts go on whatever they cost.
}

TEST_CASE("a machine that stalls now and then does not make chunks larger or prompts stop") {
  Machine machine;
  Pace pace;
  for (int i = 0; i < 30; ++i) {
    const PacedForward forward = forward_of(4, 0, i % 2 == 0 ? 0 : 64);
    // Every seventh forward is suspended for two seconds.
    pace.observe(forward, machine.seconds(forward) + (i % 7 == 3 ? 2.0 : 0.0));
  }
  const PacedForward decode = forward_of(4, 0, 0);
  REQUIRE(pace.seconds(decode) == Approx(machine.seconds(decode)).epsilon(0.1));
  const std::uint32_t chunk = pace.chunk({.decode_rows = 4}, 0, 16, 2048, 2.0);
  REQUIRE(chunk >= 48);
  REQUIRE(machine.seconds(forward_of(4, 0, chunk)) <= 2.5 * machine.seconds(decode));
}

TEST_CASE("a machine that becomes slower is followed within as many forwards of each kind as are kept") {
  Machine machine;
  Pace pace;
  const auto run = [&] {
    for (std::uint32_t i = 0; i < 2 * Pace::kKept; ++i) {
      const PacedForward forward = forward_of(4, 0, i % 2 * 32 * (1 + i % 5));
      pace.observe(forward, machine.seconds(forward));
    }
  };
  run();
  machine.token *= 10;
  run();
  REQUIRE(pace.seconds(forward_of(4, 0, 128)) == Approx(machine.seconds(forward_of(4, 0, 128))).epsilon(0.02));
}

TEST_CASE("times that are none are ignored") {
  Pace pace;
  for (const double seconds : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    pace.observe(forward_of(1, 0, 0), seconds);
  pace.observe({}, 1.0);
  REQUIRE(pace.seconds(forward_of(1, 0, 0)) == 0.0);
}

TEST_CASE("chunks are at most double what was tried") {
  Machine machine{.token = 0.0, .pair = 0.0};  // Chunks cost nothing.
  Pace pace;
  std::uint32_t last = Pace::kFirstChunk / 2;
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t chunk = pace.chunk({.decode_rows = 2}, 0, 16, 2048, 2.0);
    REQUIRE(chunk == std::min(2048u, 2 * last));
    const PacedForward forward = forward_of(2, 0, chunk);
    pace.observe(forward, machine.seconds(forward));
    last = chunk;
  }
}
