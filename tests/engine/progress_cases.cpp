// Policies that take pages by copies of their keys until they have a share of the softmax, on every device.
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr const char* kPages = "psa:microbatch=2 | int4 | page=16";

/// Tokens attended by the forwards between.
std::uint64_t attended(const EngineStats& before, const EngineStats& after) {
  return after.near_tokens + after.far_tokens + after.fetched_tokens - before.near_tokens - before.far_tokens -
         before.fetched_tokens;
}

}  // namespace

TEST_CASE("all of the mass of pages by copies is dense attention, and less is less", "[engine][progress]") {
  const auto [placement, near, windows] = GENERATE(
      grid(std::array{PlacementMode::hybrid, PlacementMode::stream}, std::array{0u, 9u}, std::array{false, true}));
  CAPTURE(to_string(placement), near, windows);
  const EngineRig rig = engine_rig();
  Story story(kShape, 330, 51);
  if (windows) story.see({40, 0, 23});
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const auto tell = [&](const std::string& share, bool dense) {
    EngineOptions options = paged_options(rig, 1, near, DigestKind::cuboid_mean);
    options.placement = placement;
    if (windows) options.windows = {40, 0, 23};
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(std::string(kPages) + " | progressive=" + share))};
    prefill(engine, rig, teller, 300);
    const EngineStats before = engine.stats();
    while (teller.at < story.tokens()) {
      CAPTURE(teller.at);
      const std::vector<float> out = decode(engine, rig, teller);
      for (const float x : out) REQUIRE(std::isfinite(x));
      if (dense) REQUIRE(error_of(out, story, teller.at - 1) < 2 * tolerance(rig));
    }
    // Nothing that the CPU would choose.
    REQUIRE(engine.stats().scored == before.scored);
    return attended(before, engine.stats());
  };
  const std::uint64_t all = tell("1", true);
  REQUIRE(tell("0.5", false) < all);
}

TEST_CASE("short sequences, from a token on, are attended densely by pages that are not full", "[engine][progress]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 17, 52);
  Engine engine(paged_options(rig, 1, 3, DigestKind::cuboid_mean), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPages))};
  while (teller.at < 17) {
    const std::vector<float> out = decode(engine, rig, teller);
    CAPTURE(teller.at);
    if (teller.at <= 16) REQUIRE(error_of(out, story, teller.at - 1) < tolerance(rig));
  }
}

TEST_CASE("rows that take pages attend in a batch what each does alone, beside others that choose",
          "[engine][progress]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) {
    return paged_options(rig, rows, near, DigestKind::cuboid_mean);
  };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 18,
                        {{kPages, 200},
                         {"pages:pages=3 | int4 | top_p=0.8 | near=0,sinks=4,recent=9", 90},
                         {"pages | int4 | progressive=0.6,rule=median | near=0,sinks=20,recent=40", 170},
                         {"psa | page=16", 143},
                         {kPages, 1},
                         {"arkvale:budget=48", 64}});
}

TEST_CASE("drafts that are verified together take the pages that all of their heads need", "[engine][progress]") {
  constexpr std::uint32_t kDrafts = 3;
  const EngineRig rig = engine_rig();
  Story story(kShape, 290, 53);
  EngineOptions options = paged_options(rig, kDrafts, 5, DigestKind::cuboid_mean);
  options.largest.drafts = kDrafts;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(std::string(kPages) + " | progressive=1"))};
  import_story(engine, rig, teller, 240);
  ForwardTensors tensors(*rig.device, kShape, kDrafts);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  while (teller.at + kDrafts <= story.tokens()) {
    for (std::uint32_t i = 0; i < kDrafts; ++i) tensors.set(i, story, teller.at + i);
    const PlanItem item{.sequence = teller.id, .tokens = kDrafts};
    (void)run_batch(engine, rig, tensors, {&item, 1}, bucket);
    for (std::uint32_t i = 0; i < kDrafts; ++i) {
      CAPTURE(teller.at, i);
      REQUIRE(error_of(tensors.out(i), story, teller.at + i) < 2 * tolerance(rig));
    }
    teller.at += kDrafts;
  }
}

TEST_CASE("an engine without room for every page says so and changes nothing", "[engine][progress]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 54);
  const PolicySpec policy = parse_policy(kPages);
  EngineOptions options = options_for(rig, 1, 0);
  {
    Engine engine(options, rig.device);
    const Refusal refusal = refusal_of([&] { (void)engine.begin(policy); });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("EngineOptions::policies") != std::string::npos);
  }
  options = named(options, {"pages:cuboid_mean,pages=99 | top_k=all | near=0,sinks=4,recent=508"});  // Of 100.
  {
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(policy)};
    prefill(engine, rig, teller, 150);
    const Refusal refusal = refusal_of([&] { (void)decode(engine, rig, teller); });
    REQUIRE(refusal.code == Errc::out_of_capacity);
    REQUIRE(refusal.text.find("every page of the 100") != std::string::npos);
    REQUIRE(engine.tokens(teller.id) == 150);
  }
  options.policies.push_back(policy);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 150);
  REQUIRE(decode(engine, rig, teller).size() == kShape.layers * kRow);
}
