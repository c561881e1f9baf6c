// Drafts that are verified together and whose policy chooses on the CPU: once for a team, by its first row.
#include <algorithm>
#include <array>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using policies::kShape;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kPrompt = 150;
constexpr std::uint32_t kDrafts = 5;

EngineOptions options_of(const EngineRig& rig, std::uint32_t near, PlacementMode placement) {
  EngineOptions options = policies::paged_options(rig, 2 * kDrafts, near, DigestKind::cuboid_mean);
  options.largest.drafts = kDrafts;
  options.placement = placement;
  return options;
}

Teller begin(Engine& engine, const EngineRig& rig, const Story& story, const char* policy) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  policies::prefill(engine, rig, teller, kPrompt);
  return teller;
}

Bucket bucket_of(std::uint32_t drafts) {
  return {.decode_rows = 2 * drafts, .drafts = drafts, .unbounded = true, .pages = true, .rehearsed = true};
}

}  // namespace

TEST_CASE("the first row of a team gets what its policy gives it alone, whatever the drafts behind it",
          "[engine][drafts]") {
  constexpr std::array kPolicies{"lfps:bypass=0,recent=2",
                                 "tactic:least=64,size=4,recluster=64",
                                 "exact | top_k=9 | near=0,sinks=2,recent=6",
                                 "pages | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=16",
                                 "history:observe_every=3,share_group=on | top_k=24 | near=0,sinks=4,recent=16",
                                 "history+pages:share=0.2,min_pages=1 | top_p=0.9 | near=0,sinks=4,recent=3",
                                 "exact | top_k=9 | near=0,sinks=2 | dense=1",
                                 "infinigen:alpha=1 | dense=1"};
  const auto [policy, near, placement, windows] =
      GENERATE_COPY(grid(kPolicies, std::array{0u, 9u}, std::array{PlacementMode::hybrid, PlacementMode::stream},
                         std::array{false, true}));
  CAPTURE(policy, near, static_cast<int>(placement), windows);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 70, 640), other(kShape, kPrompt + 70 + kDrafts, 641);
  EngineOptions options = options_of(rig, near, placement);
  if (windows) options.windows = {0, 0, 40};
  Engine engine(options, rig.device);
  Teller alone = begin(engine, rig, story, policy);
  Teller teller = begin(engine, rig, story, policy);
  Random random(642);
  while (alone.at < story.tokens()) {
    CAPTURE(alone.at);
    const auto want = drafts::run(engine, rig, bucket_of(1), {{&alone, 1}})[0][0];
    Story mixed(kShape, other.tokens(), 643);
    mixed.begin_as(other, other.tokens());
    mixed.begin_as(story, alone.at);
    teller.story = &mixed;
    const std::uint32_t count = 1 + random.below(kDrafts);
    const auto rows = drafts::run(engine, rig, bucket_of(kDrafts), {{&teller, count}})[0];
    REQUIRE(difference(rows[0].out, want.out) < policies::tolerance(rig));
    REQUIRE(difference(rows[0].lse, want.lse) < policies::tolerance(rig));
    engine.truncate(teller.id, teller.at = alone.at);
  }
}

TEST_CASE("teams that are taken back one after another leave their policy as it was", "[engine][drafts][undo]") {
  constexpr std::array kPolicies{"history:observe_every=3,share_group=on | top_k=24 | near=0,sinks=4,recent=16",
                                 "lfps:observe_every=4,bypass=0", "tactic:least=64,size=4,recluster=64"};
  const auto [policy, forks] = GENERATE_COPY(grid(kPolicies, std::array{false, true}));
  CAPTURE(policy, forks);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 100, 670), other(kShape, kPrompt + 150, 671);
  Engine engine(options_of(rig, 0, PlacementMode::hybrid), rig.device);
  Teller calm = begin(engine, rig, story, policy);
  Teller teller = begin(engine, rig, story, policy);
  Random random(672);
  // All drafts are the story's; the first `right` of them stay.
  const auto step = [&](Teller& of, std::uint32_t right) {
    const std::uint32_t first = of.at;
    const auto rows = drafts::run(engine, rig, bucket_of(kDrafts), {{&of, kDrafts}})[0];
    engine.truncate(of.id, of.at = first + right);
    return rows[0];
  };
  const auto stray = [&] {
    const std::uint32_t tokens = teller.at;
    teller.story = &other;
    for (std::uint32_t teams = 1 + random.below(5); teams != 0; --teams) (void)step(teller, 1 + random.below(kDrafts));
    teller.story = &story;
    teller.at = tokens;
    if (!forks) return engine.truncate(teller.id, tokens);
    const SequenceId parent = teller.id;
    teller.id = engine.fork(parent, tokens);
    engine.end(parent);
  };
  while (calm.at + kDrafts <= story.tokens()) {
    CAPTURE(calm.at);
    if (random.below(3) != 0) stray();
    const std::uint32_t right = 1 + random.below(kDrafts);
    const auto want = step(calm, right);
    REQUIRE(difference(step(teller, right).out, want.out) < policies::tolerance(rig));
  }
}

TEST_CASE("what was chosen in vain behind a team is forgotten with the team's drafts", "[engine][drafts][undo]") {
  constexpr std::array kPolicies{"history:observe_every=3,share_group=on | top_k=24 | near=0,sinks=4,recent=16",
                                 "lfps:bypass=0,recent=2",
                                 "tactic:least=64,size=4,recluster=64,recent=2",
                                 "labels:channels=8,budget=24 | top_k=max(1, 100%) | near=0,sinks=2,recent=2",
                                 "exact | hadamard | top_k=24 | near=0,sinks=2,recent=2",
                                 "infinigen:alpha=1 | dense=1 | near=0,sinks=2,recent=2"};
  const char* const policy = GENERATE_COPY(from_range(kPolicies));
  CAPTURE(policy);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 70, 680), other(kShape, kPrompt + 80, 681);
  Engine engine(options_of(rig, 0, PlacementMode::hybrid), rig.device);
  Teller calm = begin(engine, rig, story, policy);
  Teller teller = begin(engine, rig, story, policy);
  Random random(682);
  const Bucket bucket = bucket_of(kDrafts);
  ForwardTensors team(*rig.device, kShape, bucket.rows()), behind(*rig.device, kShape, bucket.rows());
  const auto enqueue = [&](ForwardTensors& tensors, const Story& of, std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, of, first + i);
    const PlanItem item{.sequence = teller.id, .tokens = count};
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    return batch;
  };
  while (calm.at + kDrafts <= story.tokens()) {
    const std::uint32_t first = calm.at;
    const std::uint32_t right = 1 + random.below(kDrafts);
    CAPTURE(first, right);
    const auto want = drafts::run(engine, rig, bucket, {{&calm, kDrafts}})[0][0];
    engine.truncate(calm.id, calm.at = first + right);
    Story mixed(kShape, other.tokens(), 683);
    mixed.begin_as(other, other.tokens());
    mixed.begin_as(story, first + right);
    const Batch stays = enqueue(team, mixed, first, kDrafts);
    const Batch goes = enqueue(behind, mixed, first + kDrafts, 1);
    engine.finish(stays);
    rig.synchronize();
    if (random.below(2) == 0) std::this_thread::sleep_for(2ms);  // Threads may have learnt from it, or not.
    engine.cancel(goes);
    REQUIRE(difference(team.out(0), want.out) < policies::tolerance(rig));
    engine.truncate(teller.id, first + right);
  }
}

TEST_CASE("drafts attend everything before them where the policy of their team chooses all of it", "[engine][drafts]") {
  constexpr std::array kPolicies{"exact | top_k=400 | near=0,sinks=2,recent=6",
                                 "tactic:least=400 | near=0",
                                 "tactic:least=64,size=4,recluster=64 | int4 | fitted=1",
                                 "pages | progressive=1,microbatch=2 | near=0,sinks=4,recent=16",
                                 "history:observe_every=3 | top_k=400 | near=0,sinks=4,recent=0",
                                 "infinigen:alpha=1000,most=100% | dense=1"};
  const auto [policy, near, placement] =
      GENERATE_COPY(grid(kPolicies, std::array{0u, 9u, 40u}, std::array{PlacementMode::hybrid, PlacementMode::stream}));
  CAPTURE(policy, near, static_cast<int>(placement));
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 650), other(kShape, kPrompt + 60 + kDrafts, 651);
  Engine engine(options_of(rig, near, placement), rig.device);
  Teller teller = begin(engine, rig, story, policy);
  Teller mate = begin(engine, rig, story, "exact | int4 | top_k=6 | near=0,sinks=2,recent=3");
  Random random(652);
  while (teller.at + kDrafts <= story.tokens()) {
    const std::uint32_t first = teller.at;
    const std::uint32_t count = 1 + random.below(kDrafts);
    const std::uint32_t right = 1 + random.below(count);
    Story mixed(kShape, other.tokens(), 653);
    mixed.begin_as(other, other.tokens());
    mixed.begin_as(story, first + right);
    teller.story = mate.story = &mixed;
    const auto rows = drafts::run(engine, rig, bucket_of(kDrafts), {{&mate, count}, {&teller, count}});
    for (std::uint32_t i = 0; i < count; ++i) {
      CAPTURE(first, i, count);
      REQUIRE(drafts::error_of(rows[1][i], mixed, kShape,
                               {.first = first, .drafts = count, .draft = i, .sinks = first}) < drafts::kTolerance);
      REQUIRE(drafts::error_of(rows[0][i], mixed, kShape,
                               {.first = first, .drafts = count, .draft = i, .sinks = 2, .recent = 3, .picks = 6}) <
              drafts::kTolerance);
    }
    engine.truncate(teller.id, teller.at = first + right);
    engine.truncate(mate.id, mate.at = first + right);
  }
}

TEST_CASE("drafts that ask what their team's first row asks attend no less than by themselves", "[engine][drafts]") {
  constexpr std::array kPolicies{"exact | top_k=9 | near=0,sinks=2,recent=6",
                                 "exact | top_p=0.7 | near=0,sinks=2,recent=0",
                                 "pages | progressive=0.7,microbatch=2 | near=0,sinks=4,recent=6"};
  const auto [policy, near] = GENERATE_COPY(grid(kPolicies, std::array{0u, 9u}));
  CAPTURE(policy, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, kPrompt + 4 * kDrafts, 660);
  story.repeat_query();
  EngineOptions options = options_of(rig, near, PlacementMode::hybrid);
  options.largest.audit = true;
  const auto audit = [&](std::uint32_t drafts, const char* by) {
    Engine engine(options, rig.device);
    Teller teller = begin(engine, rig, story, by);
    Bucket bucket = bucket_of(drafts);
    bucket.audit = true;
    while (teller.at < story.tokens()) (void)drafts::run(engine, rig, bucket, {{&teller, drafts}});
    return engine.audit(teller.id);
  };
  const AuditReport alone = audit(1, policy);
  const AuditReport together = audit(kDrafts, policy);
  // Of heads that all rows bypass it is estimated what they attend; the others are bounded.
  const AuditReport bypassed = audit(kDrafts, "lfps");
  for (const HeadAudit& head : bypassed.heads) REQUIRE(head.bound_broken == 0);
  REQUIRE(together.tokens == 4 * kDrafts);
  REQUIRE(together.dense_tokens == alone.dense_tokens);
  for (std::size_t h = 0; h < alone.heads.size(); ++h) {
    CAPTURE(h);
    REQUIRE(together.heads[h].steps == 4 * kDrafts);
    REQUIRE(together.heads[h].bound_broken == 0);
    REQUIRE(together.heads[h].coverage_min > alone.heads[h].coverage_min - 0.02);
  }
}
