// Room for policies that rank pages, and what an engine says that has none, on every device.
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

const char* const kQuest = "pages:quest,budget=80 | top_k=all | near=0,sinks=0,recent=0";

}  // namespace

TEST_CASE("room is made for every policy, and only for what goes together", "[engine]") {
  const EngineRig rig = engine_rig();
  const EngineOptions least{.shape = kShape,
                            .kv_dtype = rig.kv_dtype,
                            .host_bytes = 8 * MiB,
                            .largest = {.top_k = false},
                            .threads = 1,
                            .pin_threads = false};
  for (const PolicyPreset& preset : policy_presets()) {
    PolicySpec policy = preset.spec;
    policy.near.share = 0.f;
    CAPTURE(policy.name);
    EngineOptions options = least;
    options.policies = {policy};
    Engine engine(options, rig.device);
    const Story story(kShape, 600, 5);
    Teller teller{.story = &story, .id = engine.begin(policy)};
    import_story(engine, rig, teller, 597);
    while (teller.at < 600) (void)decode(engine, rig, teller);
    // One that wants less changes nothing.
    EngineOptions both = options;
    both.policies.push_back(parse_policy("none | near=0,sinks=0,recent=1"));
    const Engine other(both, rig.device);
    REQUIRE(other.options().largest == engine.options().largest);
    REQUIRE(other.sizes() == engine.sizes());
  }
  REQUIRE(code_of([&] { (void)resolved(named(least, {kQuest, "psa"})); }) == Errc::unsupported);
  REQUIRE(code_of([&] {
            (void)resolved(named(least, {kQuest, "history+pages | top_k=9 | near=3%"}));
          }) == Errc::unsupported);
  REQUIRE(Engine(named(least, {kQuest}), rig.device).sizes().digests == DigestKind::box);
}

TEST_CASE("an engine says what it lacks to rank pages", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto refuses = [&](const EngineOptions& options, const char* policy) {
    Engine engine(options, rig.device);
    return code_of([&] { (void)engine.begin(parse_policy(policy)); });
  };
  REQUIRE(refuses(options_for(rig, 1, 0), kQuest) == Errc::unsupported);
  REQUIRE(refuses(paged_options(rig, 1, 0, DigestKind::cuboid_mean), kQuest) == Errc::unsupported);
  const EngineOptions narrow =
      named(options_for(rig, 1, 0), {"pages:quest,budget=80 | top_k=all | near=0,sinks=0,recent=20"});
  REQUIRE(refuses(narrow, "pages:quest,budget=80 | top_k=all | near=0,sinks=0,recent=21") == Errc::unsupported);
  REQUIRE(refuses(paged_options(rig, 1, 0, DigestKind::box), "pages:quest | top_k=all | near=5%") == Errc::unsupported);
  EngineOptions none = options_for(rig, 1, 0);
  none.largest.pages = true;
  REQUIRE(code_of([&] { Engine engine(none, rig.device); }) == Errc::invalid_argument);

  EngineOptions few = paged_options(rig, 1, 0, DigestKind::box);
  few.policies = {parse_policy("pages:quest,pages=4 | top_k=all | near=0,sinks=0,recent=16")};
  Engine engine(few, rig.device);
  const Story story(kShape, 200, 3);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kQuest))};
  import_story(engine, rig, teller, 150);
  REQUIRE(code_of([&] { (void)decode(engine, rig, teller); }) == Errc::out_of_capacity);
  // Nor is all of it attended where there is no room, because the budget holds everything.
  EngineOptions bounded = few;
  bounded.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  bounded.largest.unbounded = false;
  Engine small(bounded, rig.device);
  const Story other(bounded.shape, 200, 4);
  Teller whole{.story = &other,
               .id = small.begin(parse_policy("pages:quest,budget=4000 | top_k=all | near=0,sinks=0,recent=0"))};
  import_story(small, rig, whole, 150);
  const PlanItem one{.sequence = whole.id};
  REQUIRE(code_of([&] { (void)small.plan({&one, 1}, small.options().largest, rig.stream); }) == Errc::out_of_capacity);
  Bucket bucket = engine.options().largest;
  bucket.pages = false;
  const PlanItem item{.sequence = teller.id};
  REQUIRE(code_of([&] { (void)engine.plan({&item, 1}, bucket, rig.stream); }) == Errc::invalid_argument);
  REQUIRE(engine.memory().digests == 100u * near_block_bytes(engine.options()) / engine.options().page_tokens);
}
