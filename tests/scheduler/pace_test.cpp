// How long forwards take, and how long a chunk may be beside rows that decode: held against times made by a formula.
#include "scheduler/admission/pace.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "scheduler/admission/prompt_share.hpp"
#include "tests/support/catch.hpp"

using namespace sluice::scheduler;

namespace {

/// A machine whose forwards take as long as a formula says, and a little longer by chance.
struct Machine {
  double base = 0.004, decode = 0.0002, token = 0.00005, pair = 2e-9;
  double chunk = 0.0, key = 0.0;  ///< what a chunk costs beside its tokens
  double noise = 0.0;  ///< of the time, at most
  std::mt19937 random{7};

  double seconds(const PacedForward& forward) {
    const double exact =
        base + decode * forward.decode_rows + token * forward.chunk_tokens + pair * forward.chunk_pairs +
        (forward.chunk_tokens == 0 ? 0.0 : chunk + key * forward.chunk_keys);
    return exact * (1.0 + noise * std::uniform_real_distribution<double>(0.0, 1.0)(random));
  }
};

PacedForward forward_of(std::uint32_t rows, std::uint32_t first, std::uint32_t tokens) {
  PacedForward forward{.decode_rows = rows};
  if (tokens != 0) forward.add_chunk(first, tokens);
  return forward;
}

/// A prompt that is read beside `rows` that decode, as a share says; what comes after its first ten chunks.
struct Reading {
  double worst = 0.0;   ///< forward, over one without a chunk
  double mean = 0.0;    ///< likewise
  double tokens = 0.0;  ///< of the prompt, a second
};
Reading read(Machine& machine, Pace& pace, std::uint32_t rows, std::uint32_t tokens, double slowdown) {
  const double alone = machine.seconds(forward_of(rows, 0, 0));
  PromptShare share;
  Reading reading;
  double seconds = 0.0;
  int turns = 0, chunks = 0, skipped = 0;
  std::uint32_t counted = 0;
  for (std::uint32_t first = 0; first < tokens;) {
    const std::uint32_t most = std::min(2048u, tokens - first);
    const std::uint32_t count = share.first_chunk(pace, rows, first, std::min(16u, most), most, slowdown);
    REQUIRE(count <= most);
    skipped = count == 0 ? skipped + 1 : 0;
    REQUIRE(skipped <= static_cast<int>(PromptShare::kMostWaits));
    const PacedForward forward = forward_of(rows, first, count);
    const double took = machine.seconds(forward);
    pace.observe(forward, took);
    share.settle(pace, forward, true, slowdown);
    first += count;
    chunks += count == 0 ? 0 : 1;
    if (chunks <= 10) continue;
    reading.worst = std::max(reading.worst, took / alone);
    seconds += took;
    counted += count;
    ++turns;
  }
  reading.mean = seconds / alone / std::max(1, turns);
  reading.tokens = counted / seconds;
  return reading;
}

}  // namespace

TEST_CASE("causal pairs of chunks, and the keys that they see", "[admission][pace]") {
  REQUIRE(forward_of(1, 0, 1).chunk_pairs == 1.0);
  REQUIRE(forward_of(1, 10, 2).chunk_pairs == 11.0 + 12.0);
  PacedForward forward = forward_of(3, 0, 4);
  REQUIRE(forward.chunk_pairs == 1.0 + 2.0 + 3.0 + 4.0);
  REQUIRE(forward.chunk_keys == 4.0);
  forward.add_chunk(10, 2);
  REQUIRE(forward.chunk_pairs == 10.0 + 11.0 + 12.0);
  REQUIRE((forward.chunk_keys == 16.0 && forward.chunk_tokens == 6 && forward.decode_rows == 3));
}

TEST_CASE("where nothing is known prompts begin with a small chunk", "[admission][pace]") {
  const Pace pace;
  PromptShare share;
  REQUIRE(pace.seconds(forward_of(1, 0, 64)) == 0.0);
  REQUIRE(share.first_chunk(pace, 1, 0, 16, 2048, 2.0) == PromptShare::kFirstChunk);
  REQUIRE(share.first_chunk(pace, 1, 0, 16, 32, 2.0) == 32);
  REQUIRE(share.first_chunk(pace, 1, 0, 256, 2048, 2.0) == 256);
  REQUIRE(share.first_chunk(pace, 0, 0, 16, 2048, 2.0) == 2048);  // Nobody waits.
}

TEST_CASE("a pace finds the times of a machine without noise", "[admission][pace]") {
  Machine machine;
  Pace pace;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const PacedForward forward = forward_of(1 + i % 8, 1000 * (i % 5), 64 * (i % 4));
    pace.observe(forward, machine.seconds(forward));
  }
  for (const PacedForward& forward : {forward_of(3, 0, 0), forward_of(8, 4000, 512), forward_of(1, 100'000, 512)})
    REQUIRE(pace.seconds(forward) == Approx(machine.seconds(forward)).epsilon(0.02));
}

TEST_CASE("beside rows that decode a prompt's forwards keep to the slowdown, and use it", "[admission][pace]") {
  for (const double noise : {0.0, 0.1}) {
    for (const std::uint32_t rows : {1u, 8u, 64u}) {
      CAPTURE(noise, rows);
      Machine machine{.noise = noise};
      Pace pace;
      for (int i = 0; i < 8; ++i) pace.observe(forward_of(rows, 0, 0), machine.seconds(forward_of(rows, 0, 0)));
      const Reading reading = read(machine, pace, rows, 60'000, 2.0);
      REQUIRE(reading.mean <= 2.0 + noise);
      REQUIRE(reading.mean >= 1.6);
      // Where times are noisy, a part of what tokens take may be taken for what a chunk does by its being there.
      REQUIRE(reading.worst <= (noise == 0.0 ? 2.05 : 4.0));
    }
  }
}

TEST_CASE("where every chunk costs much, prompts save for chunks that are worth it", "[admission][pace]") {
  for (const double noise : {0.0, 0.1}) {
    for (const double slowdown : {1.2, 2.0, 4.0}) {
      CAPTURE(noise, slowdown);
      // Eight answers in a graph, and a chunk that is not in one: three times as long for a single token.
      Machine machine{.base = 0.007, .decode = 0.0001, .token = 0.00009, .pair = 5e-11, .chunk = 0.015, .key = 5e-8,
                      .noise = noise};
      Pace pace;
      for (int i = 0; i < 8; ++i) pace.observe(forward_of(8, 0, 0), machine.seconds(forward_of(8, 0, 0)));
      const Reading reading = read(machine, pace, 8, 130'000, slowdown);
      REQUIRE(reading.mean <= slowdown * (1.0 + noise) + 0.05);
      // Of the time beyond the answers' own, two thirds go to tokens; these take 90 us and more with the tokens before.
      const double most = (1.0 - 1.0 / slowdown) / (0.00009 + 5e-11 * 65'000);
      REQUIRE(reading.tokens >= 0.55 * most);
      // What one chunk takes: three times what its being there costs, if that is known well.
      const double three = 1.0 + 3.3 * (0.015 + 5e-8 * 130'000) / 0.0078;
      const double most_stall = noise == 0.0 ? three : 1.2 * PromptShare::kMostStall * slowdown;
      REQUIRE(reading.worst <= std::max(slowdown, most_stall) * (1.0 + noise));
    }
  }
}

TEST_CASE("what nobody waits for is not saved", "[admission][pace]") {
  Machine machine{.chunk = 0.015};
  Pace pace;
  PromptShare share;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const PacedForward forward = forward_of(4, 0, i % 4 * 64);
    pace.observe(forward, machine.seconds(forward));
  }
  for (int i = 0; i < 1000; ++i) share.settle(pace, forward_of(4, 0, 0), false, 2.0);
  int waits = 0;
  for (; share.first_chunk(pace, 4, 0, 16, 2048, 2.0) == 0; ++waits)
    share.settle(pace, forward_of(4, 0, 0), true, 2.0);
  REQUIRE(waits >= 3);
}

TEST_CASE("chunks become smaller the more tokens lie before them, and prompts go on whatever they cost",
          "[admission][pace]") {
  Machine machine{.pair = 2e-8};
  Pace pace;
  for (int i = 0; i < 8; ++i) pace.observe(forward_of(4, 0, 0), machine.seconds(forward_of(4, 0, 0)));
  (void)read(machine, pace, 4, 50'000, 2.0);
  PromptShare share;
  const std::uint32_t early = share.first_chunk(pace, 4, 0, 1, 2048, 2.0);
  const std::uint32_t late = share.first_chunk(pace, 4, 50'000, 1, 2048, 2.0);
  REQUIRE(early > 2 * late);
  std::uint32_t waits = 0;
  for (; share.first_chunk(pace, 4, 1'000'000'000, 16, 2048, 2.0) == 0; ++waits)
    share.settle(pace, forward_of(4, 0, 0), true, 2.0);
  REQUIRE(waits == PromptShare::kMostWaits);
}

TEST_CASE("a machine that stalls now and then does not make chunks larger or prompts stop", "[admission][pace]") {
  Machine machine;
  Pace pace;
  for (int i = 0; i < 30; ++i) {
    const PacedForward forward = forward_of(4, 0, i % 2 == 0 ? 0 : 64);
    // Every seventh forward is suspended for two seconds.
    pace.observe(forward, machine.seconds(forward) + (i % 7 == 3 ? 2.0 : 0.0));
  }
  const PacedForward decode = forward_of(4, 0, 0);
  REQUIRE(pace.seconds(decode) == Approx(machine.seconds(decode)).epsilon(0.1));
  const std::uint32_t chunk = PromptShare().first_chunk(pace, 4, 0, 16, 2048, 2.0);
  REQUIRE(chunk >= 48);
  REQUIRE(machine.seconds(forward_of(4, 0, chunk)) <= 2.5 * machine.seconds(decode));
}

TEST_CASE("a machine that becomes slower is followed within as many forwards of each kind as are kept",
          "[admission][pace]") {
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

TEST_CASE("times that are none are ignored", "[admission][pace]") {
  Pace pace;
  for (const double seconds : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    pace.observe(forward_of(1, 0, 0), seconds);
  pace.observe({}, 1.0);
  REQUIRE(pace.seconds(forward_of(1, 0, 0)) == 0.0);
}

TEST_CASE("chunks are at most a quarter longer than what was tried", "[admission][pace]") {
  Machine machine{.token = 0.0, .pair = 0.0};  // Chunks cost nothing.
  Pace pace;
  PromptShare share;
  std::uint32_t last = 0;
  for (int i = 0; i < 20; ++i) {
    const std::uint32_t chunk = share.first_chunk(pace, 2, 0, 16, 2048, 2.0);
    REQUIRE(chunk == (last == 0 ? PromptShare::kFirstChunk : std::min(2048u, last + last / 4)));
    const PacedForward forward = forward_of(2, 0, chunk);
    pace.observe(forward, machine.seconds(forward));
    last = chunk;
  }
}
