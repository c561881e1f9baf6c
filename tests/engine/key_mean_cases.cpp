// Copies of keys are made with the mean key of the sequence's first page, however its tokens came.

#include <algorithm>
#include <functional>
#include <vector>

#include "tests/support/engine_park.hpp"

namespace sluice::test {

using namespace parks;
using prefixes::begin_named;
using prefixes::ids_of;

namespace {

constexpr std::uint32_t kTokens = 70, kDecoded = 6;
constexpr std::uint32_t kSinks = 2, kRecent = 3, kPicks = 9;
constexpr const char* kPolicy = "exact | int4 | top_k=9 | near=0,sinks=2,recent=3";
constexpr const char* kFewBits = "exact | int3 | top_k=9 | near=0,sinks=2,recent=3";

/// Keys with a part that makes codes worthless which were made with one mean key and are read with another.
Story lifted(const EngineRig& rig, std::uint64_t seed, std::uint32_t bits = 4) {
  Story story(kShape, kTokens + kDecoded, seed);
  story.code_in(bits);
  story.lift_keys(16.f, 700);
  story.round_rows(rig.kv_dtype);
  return story;
}

struct World {
  const EngineRig& rig;
  Engine& engine;
  const Story& story;  ///< that every life ends with
  const Story& other;
  const char* policy = kPolicy;

  [[nodiscard]] Teller begin(const Story& as) const { return {.story = &as, .id = engine.begin(parse_policy(policy))}; }
  /// Of a sequence that had other tokens behind `kept`, which it takes back.
  [[nodiscard]] Teller strayed(std::uint32_t kept) const {
    Story astray = other;
    astray.begin_as(story, kept);
    Teller teller = begin(astray);
    import_story(engine, rig, teller, kTokens);
    engine.truncate(teller.id, kept);
    return {.story = &story, .id = teller.id, .at = kept};
  }
  /// The next tokens, in rows of a prompt or so that each chooses.
  void go(Teller& teller, const std::vector<std::uint32_t>& counts, bool prompt) const {
    for (const std::uint32_t count : counts) (void)run(engine, rig, {&teller}, {count}, prompt);
  }
  void cancel_chunk(const Teller& teller, std::uint32_t count) const {
    Bucket bucket = engine.options().largest;
    ForwardTensors tensors(*rig.device, kShape, bucket.rows());
    for (std::uint32_t row = 0; row < count; ++row) tensors.set(row, other, teller.at + row);
    const PlanItem item{.sequence = teller.id, .tokens = count, .prefill = true};
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    rig.synchronize();
    engine.cancel(batch);
  }
};

struct Life {
  const char* name;
  std::function<Teller(const World&)> live;  ///< up to some token, none behind kTokens; the rest is imported
};

Life chunks(const char* name, std::vector<std::uint32_t> counts, bool prompt) {
  return {name, [counts = std::move(counts), prompt](const World& world) {
            Teller teller = world.begin(world.story);
            world.go(teller, counts, prompt);
            return teller;
          }};
}

Life fork(const char* name, std::uint32_t tokens) {
  return {name, [tokens](const World& world) {
            Teller parent = world.begin(world.story);
            import_story(world.engine, world.rig, parent, kTokens);
            const Teller child{.story = &world.story, .id = world.engine.fork(parent.id, tokens), .at = tokens};
            Teller goes_astray{.story = &world.other, .id = parent.id, .at = kTokens};
            world.go(goes_astray, {1}, false);
            return child;
          }};
}

Life resume(const char* name, std::uint32_t tokens) {
  return {name, [tokens](const World& world) {
            Teller teller = world.begin(world.story);
            import_story(world.engine, world.rig, teller, tokens);
            const Area area = parked(world.engine, teller.id);
            world.engine.end(teller.id);
            return resumed(world.engine, area, teller);
          }};
}

Life truncated(const char* name, std::uint32_t kept) {
  return {name, [kept](const World& world) { return world.strayed(kept); }};
}

Life cancelled(const char* name, std::uint32_t tokens, std::uint32_t count) {
  return {name, [tokens, count](const World& world) {
            Teller teller = world.begin(world.story);
            import_story(world.engine, world.rig, teller, tokens);
            world.cancel_chunk(teller, count);
            return teller;
          }};
}

std::vector<Life> lives() {
  const std::vector<std::uint32_t> ones(20, 1);
  return {
      chunks("chunks", {5, 30, 30}, true),
      chunks("a first page and more", {16, 40}, true),
      chunks("a first page, a token and more", {17, 1, 2}, true),
      chunks("token by token", ones, false),
      chunks("some tokens at a time", {3, 4, 4, 4, 4, 4}, false),
      {"imported a few at a time",
       [](const World& world) {
         Teller teller = world.begin(world.story);
         import_story(world.engine, world.rig, teller, kTokens, 7);
         return teller;
       }},
      {"of pages that were known",
       [](const World& world) {
         Teller first = begin_named(world.engine, world.story, world.policy, ids_of(kTokens));
         import_story(world.engine, world.rig, first, kTokens);
         const Teller again = begin_named(world.engine, world.story, world.policy, ids_of(kTokens));
         REQUIRE(again.at == 64);
         return again;
       }},
      fork("forked", kTokens),
      fork("forked in its first page", 5),
      fork("forked behind its first page", 16),
      fork("forked behind a token more", 17),
      resume("resumed", kTokens),
      resume("resumed in its first page", 11),
      resume("resumed behind its first page", 16),
      resume("resumed behind a token more", 17),
      truncated("taken back", 40),
      truncated("taken back to a token behind the first page", 17),
      truncated("taken back to the first page", 16),
      truncated("taken back into the first page", 5),
      truncated("taken back to nothing", 0),
      cancelled("cancelled over the end of the first page", 10, 30),
      cancelled("cancelled behind the first page", 16, 30),
  };
}

EngineOptions options_of(const EngineRig& rig, std::uint32_t near) {
  EngineOptions options = options_for(rig, 4, near);
  options.import_rows = 100;
  options.largest.unbounded = options.largest.rehearsed = false;
  return named(options, {kManyTokens});
}

/// Outputs of the tokens behind kTokens.
std::vector<std::vector<float>> decoded(const World& world, Teller teller) {
  import_story(world.engine, world.rig, teller, kTokens);
  std::vector<std::vector<float>> out;
  while (teller.at < kTokens + kDecoded) out.push_back(decode(world.engine, world.rig, teller));
  return out;
}

}  // namespace

TEST_CASE("the mean key is the same however a sequence got its tokens", "[engine][int4]") {
  const EngineRig rig = engine_rig();
  const auto [near, bits] = GENERATE(table<std::uint32_t, std::uint32_t>({{0u, 4u}, {3u, 4u}, {0u, 3u}, {3u, 3u}}));
  const Story story = lifted(rig, 701, bits), other = lifted(rig, 702, bits);
  EngineOptions options = named(options_of(rig, near), {bits == 3 ? kManyTokensBy3 : kManyTokens});
  const char* const policy = bits == 3 ? kFewBits : kPolicy;
  Engine engine(options, rig.device);
  const World world{rig, engine, story, other, policy};
  const std::vector<std::vector<float>> want = decoded(world, world.begin(story));
  for (std::uint32_t i = 0; i < kDecoded; ++i) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
      REQUIRE(off_in_layer(want[i], story.attended(layer, kTokens + i, kSinks, kRecent, kPicks), layer) < 2e-3);
  }
  for (const Life& life : lives()) {
    CAPTURE(life.name, near, bits);
    Engine own(options, rig.device);
    const World there{rig, own, story, other, policy};
    const auto got = decoded(there, life.live(there));
    for (std::uint32_t i = 0; i < kDecoded; ++i) {
      CAPTURE(i);
      REQUIRE(difference(got[i], want[i]) < tolerance(rig));
    }
  }
}

TEST_CASE("a sequence that is back in its first page has no mean key", "[engine][int4]") {
  const EngineRig rig = engine_rig();
  const Story story = lifted(rig, 701), other = lifted(rig, 702);
  const EngineOptions options = options_of(rig, 3);
  const char* const policy = "exact | int4 | top_k=2 | near=0,sinks=1,recent=1";
  constexpr std::uint32_t kLast = 20;
  std::vector<std::vector<float>> want;
  {
    Engine engine(options, rig.device);
    const World world{rig, engine, story, other, policy};
    for (Teller teller = world.begin(story); teller.at < kLast;) want.push_back(decode(engine, rig, teller));
  }
  const std::vector<Life> lives = {fork("forked", 5), resume("resumed", 11), truncated("taken back", 5),
                                   truncated("taken back to all of the page", 16), cancelled("cancelled", 10, 30)};
  for (const Life& life : lives) {
    Engine engine(options, rig.device);
    const World world{rig, engine, story, other, policy};
    for (Teller teller = life.live(world); teller.at < kLast;) {
      const std::uint32_t token = teller.at;
      CAPTURE(life.name, token);
      REQUIRE(difference(decode(engine, rig, teller), want[token]) < tolerance(rig));
    }
  }
}

}  // namespace sluice::test
