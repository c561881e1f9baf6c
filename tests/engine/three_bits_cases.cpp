// Tokens that are chosen and drawn by copies of keys of 3 bits: `int3`.
#include "tests/support/engine_draws.hpp"
#include "tests/support/engine_park.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::draws;
using parks::parked;
using prefixes::begin_named;
using prefixes::ids_of;

namespace {

constexpr const char* kThreeBits = "exact | int3 | sample=12 | near=0,sinks=4,recent=20";

EngineOptions three_bits(const EngineRig& rig, std::uint32_t rows, std::uint32_t near) {
  return named(options_for(rig, rows, near), {kManyTokensBy3, kOnCpu});
}

Story coded_story(const EngineRig& rig, std::uint32_t tokens, std::uint64_t seed) {
  Story story = story_of(rig, tokens, seed);
  story.code_in(3);
  return story;
}

}  // namespace

TEST_CASE("attention sampled by 3 bits is the reference's, near, far and over the link", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const auto [near, rows, stream] = GENERATE(
      table<std::uint32_t, std::uint32_t, bool>({{0u, 1u, false}, {0u, 1u, true}, {7u, 1u, false}, {7u, 2u, false}}));
  CAPTURE(near, rows, stream);
  const Story story = coded_story(rig, 300, 941);
  EngineOptions options = three_bits(rig, rows, near);
  if (stream) options.placement = PlacementMode::stream;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, kThreeBits, 270);
  Held held;
  goes_on(engine, rig, teller, kDraws, 30, held);
  held.require();
}

TEST_CASE("a sample of all tokens by 3 bits is dense attention, bit by bit", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const Story story = coded_story(rig, 160, 942);
  Engine engine(three_bits(rig, 1, 0), rig.device);
  Teller sampled = begun(engine, rig, story, "exact | int3 | sample=200 | near=0,sinks=4,recent=20", 140);
  Teller dense = begun(engine, rig, story, prefixes::kFull, 140);
  while (sampled.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, sampled);
    REQUIRE(error_of(out, story, sampled.at - 1) < tolerance(rig));
    REQUIRE(difference(out, decode(engine, rig, dense)) == 0.0);
  }
}

TEST_CASE("ties, keys that stand out and keys that are no numbers are drawn by 3 bits", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  require_hard_keys(rig, three_bits(rig, 1, 0), coded_story(rig, 220, 943), 40.f, kThreeBits, kDraws);
}

TEST_CASE("long sequences are drawn from by 3 bits in parts of theirs", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t rows = GENERATE(1u, 2u);
  CAPTURE(rows);
  over_many_tokens(rig, three_bits(rig, rows, 9), coded_story(rig, 5016, 944),
                   "exact | int3 | sample=40 | near=0,sinks=4,recent=20", {.sinks = 4, .recent = 20, .drawn = 40})
      .require();
}

TEST_CASE("a batch that chooses by 3 bits attends what each of it does alone", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return three_bits(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(0u, 10u), 9,
                        {{kThreeBits, 200},
                         {"exact | int3 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"exact | int3 | top_p=0.9 | near=0,sinks=0,recent=1", 170},
                         {"lfps", 120},
                         {"exact | int3 | sample=9,draws=group | near=0 | dense=1", 133}});
}

TEST_CASE("what 3 bits choose depends on neither chunks, forks, prefixes, parking nor what is near", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const Story story = coded_story(rig, 230, 945);
  Engine engine(three_bits(rig, 1, 5), rig.device);
  Teller first = begin_named(engine, story, kThreeBits, ids_of(210));
  prefill(engine, rig, first, 210);
  Teller found = begin_named(engine, story, kThreeBits, ids_of(210));
  REQUIRE(found.at == 208);
  prefill(engine, rig, found, 210);
  Teller pieces{.story = &story, .id = engine.begin(parse_policy(kThreeBits))};
  for (const std::uint32_t chunk : {1u, 14u, 2u, 50u, 93u, 50u}) (void)run(engine, rig, {&pieces}, {chunk}, true);
  Teller child{.story = &story, .id = engine.fork(first.id, 210), .at = 210};
  const parks::Area area = parked(engine, first.id);
  Engine other(three_bits(rig, 1, 0), rig.device);
  Teller back{.story = &story, .id = other.resume(area), .at = 210};
  Engine wide(options_for(rig, 1, 0), rig.device);
  const Refusal refusal = refusal_of([&] { (void)wide.resume(area); });
  REQUIRE(refusal.code == Errc::unsupported);
  REQUIRE(refusal.text.find("3 bits") != std::string::npos);
  while (first.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, first);
    for (Teller* same : {&found, &pieces, &child}) REQUIRE(difference(decode(engine, rig, *same), out) < rig.tolerance);
    REQUIRE(difference(decode(other, rig, back), out) < tolerance(rig));
  }
}

TEST_CASE("an engine has copies of one width, and takes policies that name it or none", "[engine][int3]") {
  const EngineRig rig = engine_rig();
  const PolicySpec three = parse_policy(kThreeBits), four = parse_policy(kSample), none = parse_policy("lfps");
  EngineOptions options = options_for(rig, 1, 0);
  const std::uint64_t wide = memory_needed(options, rig.device.get()).codes;
  Engine usual(options, rig.device);
  REQUIRE(usual.sizes().code_bits == 4);
  REQUIRE(refusal_of([&] { (void)usual.begin(three); }).text.find("an engine of its own") != std::string::npos);
  options.policies = {none, three, none};
  Engine few(options, rig.device);
  REQUIRE(few.sizes().code_bits == 3);
  REQUIRE(code_of([&] { (void)few.begin(four); }) == Errc::unsupported);
  (void)few.begin(none);
  (void)few.begin(three);
  // Of each token, layer and KV head: scale, zero, and head_dim codes.
  const EngineMemoryUse use = few.memory();
  REQUIRE(use.codes == memory_needed(options, rig.device.get()).codes);
  REQUIRE(use.codes * (kShape.head_dim / 2 + 4) == wide * (kShape.head_dim * 3 / 8 + 4));
  options.policies = {none, three, four};
  REQUIRE(code_of([&] { Engine(options, rig.device); }) == Errc::unsupported);
}
