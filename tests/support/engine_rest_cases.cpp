// Rests: what is not attended is one token more, of an estimated weight and a mean value.
#include "tests/support/engine_rests.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::rests;

TEST_CASE("what is not attended is one token more", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const auto [picks, near, softcap, stream] =
      GENERATE(table<bool, std::uint32_t, float, bool>({{true, 0u, 0.f, false},
                                                        {true, 7u, 0.f, true},
                                                        {true, 7u, 3.f, false},
                                                        {false, 0u, 0.f, false},
                                                        {false, 7u, 2.f, true}}));
  CAPTURE(picks, near, softcap, stream);
  const Story story = story_of(rig, 300, 901);
  EngineOptions options = resting(rig, 1, near);
  options.softcap = softcap;
  if (stream) options.placement = PlacementMode::stream;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, picks ? kTopK : kTopP, 270);
  goes_on(engine, rig, teller, picks ? kPicks : kMass, 30);
}

TEST_CASE("without a full page, or with nothing left, there is no rest", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 150, 902);
  Engine engine(resting(rig), rig.device);
  Teller small{.story = &story,
               .id = engine.begin(parse_policy("exact | int4 | top_k=2 | rest=mean | near=0,sinks=1,recent=3"))};
  goes_on(engine, rig, small, {.sinks = 1, .recent = 3, .picks = 2}, 40);  // Pages fill while it decodes.
  for (const char* budget : {"top_k=all", "top_p=1"}) {
    CAPTURE(budget);
    const std::string words = std::string("exact | int4 | ") + budget;
    Teller with = begun(engine, rig, story, (words + " | rest=mean | near=0").c_str(), 140);
    Teller without = begun(engine, rig, story, (words + " | near=0").c_str(), 140);
    while (with.at < story.tokens()) {
      const std::vector<float> out = decode(engine, rig, with);
      REQUIRE(error_of(out, story, with.at - 1) < tolerance(rig));
      REQUIRE(difference(out, decode(engine, rig, without)) == 0.0);
    }
  }
}

TEST_CASE("ties, keys that stand out and keys that are no numbers are left as they are chosen", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const auto kind = GENERATE(0, 1, 2);
  CAPTURE(kind);
  Story story = story_of(rig, 220, 903);
  if (kind == 0) story.repeat_keys(9);
  if (kind == 1) story.scale_queries(205, 40.f);
  if (kind == 2) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) story.poison(layer, 60 + layer);
  }
  Engine engine(resting(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  // A prompt would attend keys that are no numbers.
  import_story(engine, rig, teller, 200);
  goes_on(engine, rig, teller, kPicks, 20);
}

TEST_CASE("of more pages than 256 the values of as many stand for all", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 2310, 904, 8);
  EngineOptions options = resting(rig);
  options.page_tokens = 8;
  options.host_bytes = 400 * block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kTopK))};
  RestPolicy policy = kPicks;
  policy.page_tokens = 8;
  import_story(engine, rig, teller, 2046);  // 255 full pages, and soon 256 and 257.
  goes_on(engine, rig, teller, policy, 11);
  import_story(engine, rig, teller, 2303);
  goes_on(engine, rig, teller, policy, 2);
}

TEST_CASE("parts of a long sequence are weighed apart, whoever has them", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t rows = GENERATE(1u, 2u);
  CAPTURE(rows);
  const Story story = story_of(rig, 5020, 916);
  EngineOptions options = resting(rig, rows, 9);
  options.host_bytes = 700 * block_bytes(options);  // On a GPU four blocks and more share a row.
  Engine engine(options, rig.device);
  for (const bool mass : {false, true}) {
    CAPTURE(mass);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(mass ? kTopP : kTopK))};
    import_story(engine, rig, teller, 5006);
    goes_on(engine, rig, teller, mass ? kMass : kPicks, 4);  // The third token begins a page.
    engine.end(teller.id);
  }
}

TEST_CASE("a batch of policies with and without a rest attends what each does alone", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return resting(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(0u, 10u), 12,
                        {{kTopK, 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {kTopP, 170},
                         {"lfps", 120},
                         {"exact | int4 | top_k=9 | rest=mean | near=0 | dense=1 | far=64", 33}});
}

TEST_CASE("layers with windows and dense layers have no rest, nor have short sequences", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  Story story = story_of(rig, 170, 910);
  story.see({40, 0, 0});
  EngineOptions options = resting(rig);
  options.windows = {40, 0, 0};
  options.dense_tokens = 100;
  Engine engine(options, rig.device);
  const auto decodes = [&](std::uint32_t from, const char* text, const auto& require) {
    Teller teller = begun(engine, rig, story, text, from);
    const std::vector<float> out = decode(engine, rig, teller);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      CAPTURE(from, layer);
      require(out, layer);
    }
  };
  const auto dense = [&](std::uint32_t token, std::uint32_t layer) {
    return story.attended(layer, token, 100'000, 1, 0);
  };
  const std::string text = std::string(kTopK) + " | dense=2";
  decodes(150, text.c_str(), [&](const std::vector<float>& out, std::uint32_t layer) {
    const auto want = layer == 2 ? attended_with_rest(story, kShape, layer, 150, kPicks).out : dense(150, layer);
    REQUIRE(off_in_layer(out, want, layer) < tolerance(rig));
  });
  decodes(90, kTopK, [&](const std::vector<float>& out, std::uint32_t layer) {
    REQUIRE(off_in_layer(out, dense(90, layer), layer) < tolerance(rig));
  });
}

TEST_CASE("audits count what was attended, and what the rest mends", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 240, 911);
  EngineOptions options = resting(rig);
  options.largest.audit = true;
  const auto audit = [&](const char* text) {
    Engine engine(options, rig.device);
    Teller teller = begun(engine, rig, story, text, 220);
    while (teller.at < story.tokens()) (void)decode(engine, rig, teller);
    return engine.audit(teller.id);
  };
  const AuditReport with = audit(kTopK);
  const AuditReport without = audit("exact | int4 | top_k=12 | near=0,sinks=4,recent=20");
  require_same_audit(with, without);
  double error = 0.0, before = 0.0;
  for (std::size_t i = 0; i < with.heads.size(); ++i) {
    error += with.heads[i].error;
    before += without.heads[i].error;
  }
  REQUIRE(error < 0.8 * before);
}

TEST_CASE("a rest is refused where nothing weighs one", "[engine][rest]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 2, 0);
  {
    Engine engine(options, rig.device);
    const Refusal refusal = refusal_of([&] { (void)engine.begin(parse_policy(kTopK)); });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("value_means") != std::string::npos);
  }
  const EngineMemoryUse less = memory_needed(options);
  make_room_for(parse_policy("exact | int4 | rest=mean"), 300, options);
  REQUIRE(options.value_means);
  // A page has as many keys as values, and one mean.
  REQUIRE(memory_needed(options).digests == less.digests + 100 * near_block_bytes(options) / (2 * options.page_tokens));
  Engine engine(options, rig.device);
  REQUIRE(engine.memory().digests == memory_needed(options).digests);
  (void)engine.begin(parse_policy(kTopK));
}
