// Rests: what is not attended is one token more, of an estimated weight and a mean value.
#include <cmath>

#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/rest_reference.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using parks::parked;
using prefixes::begin_named;
using prefixes::ids_of;

namespace {

constexpr const char* kTopK = "exact | int4 | top_k=12 | rest=mean | near=0,sinks=4,recent=20";
constexpr const char* kTopP = "exact | int4 | top_p=0.6 | rest=mean | near=0,sinks=4,recent=20";
constexpr RestPolicy kPicks{.sinks = 4, .recent = 20, .picks = 12};
/// As the parser reads 0.6.
constexpr RestPolicy kMass{.sinks = 4, .recent = 20, .mass = static_cast<double>(0.6f)};

EngineOptions resting(const EngineRig& rig, std::uint32_t rows = 1, std::uint32_t near = 0) {
  EngineOptions options = options_for(rig, rows, near);
  options.value_means = true;
  return options;
}

Story story_of(const EngineRig& rig, std::uint32_t tokens, std::uint64_t seed) {
  Story story(kShape, tokens, seed);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// The next token, all of whose layers are held against the reference: outputs, and their lse.
void goes_on(Engine& engine, const EngineRig& rig, Teller& teller, const RestPolicy& policy) {
  AttentionShape shape = kShape;
  shape.softcap = engine.options().softcap;
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  tensors.set(0, *teller.story, teller.at);
  const std::array items{PlanItem{.sequence = teller.id}};
  (void)run_batch(engine, rig, tensors, items, bucket);
  const std::vector<float> out = tensors.out(0);
  const std::vector<float> lse = tensors.lse(0);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    CAPTURE(teller.at, layer);
    const Attention want = attended_with_rest(*teller.story, shape, layer, teller.at, policy);
    REQUIRE(off_in_layer(out, want.out, layer) < tolerance(rig));
    const auto of_layer = std::span(lse).subspan(layer * kShape.q_heads, kShape.q_heads);
    const double largest = std::abs(*std::ranges::max_element(want.lse, {}, [](double x) { return std::abs(x); }));
    REQUIRE(difference(of_layer, want.lse) < tolerance(rig) * std::max(1.0, largest));
  }
  ++teller.at;
}

void goes_on(Engine& engine, const EngineRig& rig, Teller& teller, const RestPolicy& policy, std::uint32_t tokens) {
  for (std::uint32_t i = 0; i < tokens; ++i) goes_on(engine, rig, teller, policy);
}

Teller begun(Engine& engine, const EngineRig& rig, const Story& story, const char* text, std::uint32_t tokens) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, teller, tokens);
  return teller;
}

}  // namespace

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
  const Story story = story_of(rig, 2310, 904);
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
  const Bucket bucket{.decode_rows = 5, .unbounded = true};
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
  make_room_for(parse_policy("sluice | rest=mean"), 300, options);
  REQUIRE(options.value_means);
  // A page has as many keys as values, and one mean.
  REQUIRE(memory_needed(options).digests == less.digests + 100 * near_block_bytes(options) / (2 * options.page_tokens));
  Engine engine(options, rig.device);
  REQUIRE(engine.memory().digests == memory_needed(options).digests);
  (void)engine.begin(parse_policy(kTopK));
}
