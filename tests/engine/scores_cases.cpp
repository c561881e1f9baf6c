// Rows that choose by scores of the caller, as those of a trained indexer: what they attend, against float64.
#include <array>
#include <string>

#include "tests/support/draw_reference.hpp"
#include "tests/support/engine_scores.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::scores;

TEST_CASE("rows attend the tokens that the caller scores highest", "[engine][scores]") {
  const Kind kind = GENERATE(Kind::any, Kind::ties, Kind::equal, Kind::few, Kind::one);
  const auto [near, stream, shared] =
      GENERATE(table<std::uint32_t, bool, bool>({{0u, false, false}, {7u, false, true}, {7u, true, false}}));
  CAPTURE(static_cast<int>(kind), near, stream, shared);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story = story_of(rig, shape, 230, 1101);
  EngineOptions options = options_for(rig, shape, 1, near);
  if (stream) options.placement = PlacementMode::stream;
  Engine engine(options, rig.device);
  const Policy policy{.picks = 20};
  Teller teller = begun(engine, rig, story, policy.text(), 215);
  while (teller.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, teller, kind, shared);
    CAPTURE(teller.at);
    REQUIRE(off(out, story, shape, {.first = teller.at - 1}, policy, kind, shared) < tolerance(rig));
  }
}

TEST_CASE("groups of any size choose by the scores of their KV head, from the first token on", "[engine][scores]") {
  const std::uint32_t group = GENERATE(1u, 3u, 7u);
  CAPTURE(group);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(group);
  const Story story = story_of(rig, shape, 40, 1102);
  Engine engine(options_for(rig, shape, 1, 3), rig.device);
  const Policy policy{.sinks = 1, .recent = 0, .picks = 5};  // The new token is attended whatever it scores.
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy.text()))};
  while (teller.at < story.tokens()) {
    const Kind kind = teller.at % 2 == 0 ? Kind::any : Kind::few;
    const std::vector<float> out = decode(engine, rig, teller, kind);
    CAPTURE(teller.at);
    REQUIRE(off(out, story, shape, {.first = teller.at - 1}, policy, kind) < tolerance(rig));
  }
}

TEST_CASE("long sequences find the highest scores in parts of theirs", "[engine][scores]") {
  const Kind kind = GENERATE(Kind::any, Kind::ties, Kind::few);
  CAPTURE(static_cast<int>(kind));
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story = story_of(rig, shape, 5006, 1103);
  EngineOptions options = options_for(rig, shape, 1, 9);
  options.host_bytes = 330 * block_bytes(options);
  Engine engine(options, rig.device);
  const Policy policy{.picks = 60};
  Teller teller = begun(engine, rig, story, policy.text(), 5003);
  while (teller.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, teller, kind);
    REQUIRE(off(out, story, shape, {.first = teller.at - 1}, policy, kind) < tolerance(rig));
  }
}

TEST_CASE("a share of the mass is that of the caller's scores, which no softcap bends", "[engine][scores]") {
  const auto [kind, softcap] =
      GENERATE(table<Kind, float>({{Kind::any, 0.f}, {Kind::any, 2.f}, {Kind::few, 0.f}, {Kind::equal, 0.f}}));
  CAPTURE(static_cast<int>(kind), softcap);
  const EngineRig rig = engine_rig();
  AttentionShape shape = shape_of(3);
  const Story story = story_of(rig, shape, 180, 1104);
  EngineOptions options = options_for(rig, shape, 1, 5);
  options.largest.unbounded = true;
  options.softcap = softcap;
  Engine engine(options, rig.device);
  const Policy policy{.mass = 0.7};
  Teller teller = begun(engine, rig, story, policy.text(), 168);
  shape.softcap = softcap;
  while (teller.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, teller, kind);
    CAPTURE(teller.at);
    REQUIRE(off(out, story, shape, {.first = teller.at - 1}, policy, kind) < tolerance(rig));
  }
}

TEST_CASE("with a budget of all tokens rows attend densely, whatever they score", "[engine][scores]") {
  const char* const budget = GENERATE("top_k=all", "top_p=1");
  const Kind kind = GENERATE(Kind::any, Kind::equal);
  CAPTURE(budget, static_cast<int>(kind));
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story = story_of(rig, shape, 190, 1106);
  EngineOptions options = options_for(rig, shape, 1, 0);
  options.largest.unbounded = true;
  Engine engine(options, rig.device);
  Teller scored = begun(engine, rig, story, std::string("scores | ") + budget + " | near=0", 180);
  Teller dense = begun(engine, rig, story, "full", 180);
  while (scored.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, scored, kind);
    REQUIRE(difference(out, decode(engine, rig, dense)) <= (rig.on_gpu ? rig.tolerance : 0.0));
  }
}

TEST_CASE("drafts attend what any of them scores highest together, and each by itself what it would alone",
          "[engine][scores][drafts]") {
  const std::uint32_t drafts = GENERATE(1u, 3u);
  const bool shared = GENERATE(false, true);
  CAPTURE(drafts, shared);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(3);
  const Story story = story_of(rig, shape, 220, 1107), other = story_of(rig, shape, 90, 1108);
  EngineOptions options = options_for(rig, shape, 6, 5);
  options.largest.drafts = drafts;
  options.largest.prefill_rows = 20;
  options.largest.prefills = 1;
  Engine engine(options, rig.device);
  const Policy policy{.picks = 9};
  Teller first = begun(engine, rig, story, policy.text(), 200);
  Teller second = begun(engine, rig, other, policy.text(), 70);
  Teller prompt{.story = &story, .id = engine.begin(parse_policy(policy.text()))};
  Bucket bucket = engine.options().largest;
  for (const std::uint32_t count : {3u, 1u, 2u}) {
    // Rows of a prompt come between, and have no scores.
    const std::uint32_t at = first.at, beside = second.at;
    const auto out = run(engine, rig, bucket,
                         {{.teller = &first, .kind = Kind::any, .count = count},
                          {.teller = &prompt, .count = 20, .prefill = true},
                          {.teller = &second, .kind = Kind::ties, .count = 2}},
                         shared);
    for (std::uint32_t i = 0; i < count; ++i) {
      const Team team = drafts == 1 ? Team{.first = at + i} : Team{.first = at, .drafts = count, .draft = i};
      CAPTURE(at, i);
      REQUIRE(off(out[i], story, shape, team, policy, Kind::any, shared) < tolerance(rig));
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      const Team team = drafts == 1 ? Team{.first = beside + i} : Team{.first = beside, .drafts = 2, .draft = i};
      CAPTURE(beside, i);
      REQUIRE(off(out[count + 20 + i], other, shape, team, policy, Kind::ties, shared) < tolerance(rig));
    }
  }
}
