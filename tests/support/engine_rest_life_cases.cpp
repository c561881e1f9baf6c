// Rests of sequences however their tokens came, and wherever they go on.
#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/engine_rests.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::rests;
using parks::parked;
using prefixes::begin_named;
using prefixes::ids_of;

TEST_CASE("prompts in any chunks, and imported ones, leave the same rest", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 230, 905);
  Engine engine(resting(rig), rig.device);
  Teller whole = begun(engine, rig, story, kTopK, 200);
  Teller pieces{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  for (const std::uint32_t chunk : {1u, 14u, 2u, 50u, 93u, 40u}) (void)run(engine, rig, {&pieces}, {chunk}, true);
  Teller imported{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  import_story(engine, rig, imported, 200, 77);
  Teller decoded{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  while (decoded.at < 200) (void)decode(engine, rig, decoded);
  while (whole.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, whole);
    for (Teller* other : {&pieces, &imported, &decoded}) REQUIRE(difference(decode(engine, rig, *other), out) == 0.0);
  }
}

TEST_CASE("forwards of prompts alone make means", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 150, 914);
  Engine engine(resting(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  const Bucket bucket{.decode_rows = 0, .prefill_rows = 50, .prefills = 1};
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  while (teller.at < 130) {
    const std::uint32_t count = std::min(bucket.prefill_rows, 130 - teller.at);
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, story, teller.at + i);
    const std::array items{PlanItem{.sequence = teller.id, .tokens = count, .prefill = true}};
    (void)run_batch(engine, rig, tensors, items, bucket);
    teller.at += count;
  }
  goes_on(engine, rig, teller, kPicks, 20);
}

TEST_CASE("tokens of a sequence that are decoded at once, each by itself, have the means of pages that they fill",
          "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t near = GENERATE(0u, 9u);
  const Story story = story_of(rig, 300, 915);
  Engine engine(resting(rig, 5, near), rig.device);
  Teller teller = begun(engine, rig, story, kTopK, 250);
  const Bucket bucket{.decode_rows = 5, .unbounded = near == 0};  // Else a GPU may attend where it chooses.
  for (const std::uint32_t count : {5u, 3u, 4u, 5u, 1u, 5u, 5u, 5u}) {
    const std::uint32_t first = teller.at;
    const auto rows = drafts::run(engine, rig, bucket, {{&teller, count}})[0];
    for (std::uint32_t i = 0; i < count; ++i) {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        CAPTURE(first, i, layer);
        const Attention want = attended_with_rest(story, kShape, layer, first + i, kPicks);
        REQUIRE(off_in_layer(rows[i].out, want.out, layer) < tolerance(rig));
      }
    }
  }
}

TEST_CASE("forks and shortened sequences go on with the means of what they have", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 260, 906);
  Engine engine(resting(rig, 1, 5), rig.device);
  Teller teller = begun(engine, rig, story, kTopK, 240);
  for (const std::uint32_t at : {200u, 208u, 239u}) {
    Story other = story_of(rig, 260, 907 + at);
    other.begin_as(story, at);
    Teller child{.story = &other, .id = engine.fork(teller.id, at), .at = at};
    goes_on(engine, rig, child, kPicks, 18);
    engine.end(child.id);
  }
  goes_on(engine, rig, teller, kPicks, 5);
  Story other = story_of(rig, 260, 908);
  other.begin_as(story, 190);
  engine.truncate(teller.id, 190);
  Teller again{.story = &other, .id = teller.id, .at = 190};
  goes_on(engine, rig, again, kPicks, 20);
}

TEST_CASE("sequences that are found, or come back, have the means of their pages", "[engine][rest][prefix][park]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 230, 909);
  Engine engine(resting(rig, 1, 5), rig.device);
  Teller first = begin_named(engine, story, kTopK, ids_of(210));
  prefill(engine, rig, first, 210);
  Teller second = begin_named(engine, story, kTopK, ids_of(210));
  REQUIRE(second.at == 208);
  prefill(engine, rig, second, 210);
  goes_on(engine, rig, second, kPicks, 20);
  const std::vector<std::byte> area = parked(engine, first.id);
  engine.end(first.id);
  engine.end(second.id);
  Teller third = begin_named(engine, story, kTopK, ids_of(210));  // From what ended sequences have left.
  REQUIRE(third.at == 208);
  prefill(engine, rig, third, 210);
  goes_on(engine, rig, third, kPicks, 20);
  Engine other(resting(rig), rig.device);
  Teller back{.story = &story, .id = other.resume(area), .at = 210};
  goes_on(other, rig, back, kPicks, 20);
}

TEST_CASE("drafts that are verified together leave what none of them attends", "[engine][rest][drafts]") {
  const EngineRig rig = engine_rig();
  const auto [text, policy, near, softcap] = GENERATE(table<const char*, RestPolicy, std::uint32_t, float>(
      {{kTopK, kPicks, 0u, 0.f}, {kTopK, kPicks, 9u, 3.f}, {kTopP, kMass, 9u, 0.f}}));
  CAPTURE(text, near, softcap);
  const Story story = story_of(rig, 300, 913);
  EngineOptions options = resting(rig, 4, near);
  options.largest.drafts = 4;
  options.softcap = softcap;
  Engine engine(options, rig.device);
  AttentionShape shape = kShape;
  shape.softcap = softcap;
  Teller teller = begun(engine, rig, story, text, 250);
  for (const std::uint32_t count : {4u, 1u, 3u, 2u, 4u, 4u}) {  // Pages begin and end within teams.
    const RestTeam team{.first = teller.at, .drafts = count};
    const auto rows = drafts::run(engine, rig, {.decode_rows = 4, .drafts = 4, .unbounded = true}, {{&teller, count}});
    for (std::uint32_t draft = 0; draft < count; ++draft) {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        CAPTURE(team.first, draft, layer);
        const Attention want = attended_with_rest(story, shape, layer, team, draft, policy);
        REQUIRE(off_in_layer(rows[0][draft].out, want.out, layer) < tolerance(rig));
      }
    }
  }
}
