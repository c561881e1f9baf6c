// Drafts that are verified together: taken back, broken, beside other forwards, refused.
#include <algorithm>
#include <cmath>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::drafts;

TEST_CASE("drafts that are taken back leave nothing behind, whatever they were", "[engine][drafts]") {
  const std::uint32_t near = GENERATE(0u, 6u, 60u);
  CAPTURE(near);
  constexpr std::uint32_t kDrafts = 4;
  constexpr std::uint32_t kPicks = 6;
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4, 2);
  const EngineOptions options = draft_options(rig, shape, kDrafts, 2, near);
  Engine engine(options, rig.device);
  const std::uint32_t runs = kSanitized ? 2 : 12;
  for (std::uint32_t seed = 0; seed < runs; ++seed) {
    Random random(540 + seed);
    const Story story(shape, 90, 550 + seed, drafts::kPageTokens), wrong(shape, 90, 570 + seed, drafts::kPageTokens);
    const SequenceId id = engine.begin(parse_policy("exact | int4 | top_k=6 | near=0,sinks=2,recent=3"));
    Teller teller{.story = &story, .id = id};
    import_story(engine, rig, teller, random.below(20));
    while (teller.at + kDrafts <= story.tokens()) {
      // The first `right` drafts are the story's; a page may end among any of them.
      const std::uint32_t count = 1 + random.below(kDrafts);
      const std::uint32_t right = 1 + random.below(count);
      const std::uint32_t first = teller.at;
      Story mixed(shape, 90, 590, drafts::kPageTokens);
      mixed.begin_as(wrong, 90);
      mixed.begin_as(story, first + right);
      teller.story = &mixed;
      const auto rows = run(engine, rig, options.largest, {{&teller, count}})[0];
      for (std::uint32_t i = 0; i < count; ++i) {
        CAPTURE(seed, first, i, count);
        const Story::Together team{
            .first = first, .drafts = count, .draft = i, .sinks = 2, .recent = 3, .picks = kPicks};
        REQUIRE(error_of(rows[i], mixed, shape, team) < kTolerance);
      }
      engine.truncate(id, teller.at = first + right);
    }
    engine.end(id);
  }
  REQUIRE(engine.memory().far_pages_used == 0);
}

TEST_CASE("drafts can be rejected wherever pages of windows end among them", "[engine][drafts][windows]") {
  constexpr std::uint32_t kDrafts = 4;
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4, 2);
  EngineOptions options = draft_options(rig, shape, kDrafts, 1, 6);
  options.windows = GENERATE(std::vector<std::uint32_t>{0, 20}, std::vector<std::uint32_t>{13, 20});
  options.window_slack = kDrafts - 2;
  REQUIRE(code_of([&] { Engine(options, rig.device); }) == Errc::invalid_argument);
  options.window_slack = kDrafts - 1;
  Engine engine(options, rig.device);
  Story story(shape, 100, 615, drafts::kPageTokens);
  story.see(options.windows);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 40);
  while (teller.at + kDrafts <= story.tokens()) {
    const std::uint32_t first = teller.at;
    CAPTURE(first);
    const auto rows = run(engine, rig, options.largest, {{&teller, kDrafts}})[0];
    for (std::uint32_t i = 0; i < kDrafts; ++i) {
      const Story::Together team{.first = first, .drafts = kDrafts, .draft = i, .sinks = first};
      REQUIRE(error_of(rows[i], story, shape, team) < kTolerance);
    }
    engine.truncate(teller.id, teller.at = first + 1);
  }
  options.windows.assign(options.windows.size(), 0);  // Nothing is let go of.
  options.window_slack = 0;
  const Engine whole(options, rig.device);
}

TEST_CASE("a draft that is no number spoils what comes behind it, and nothing before", "[engine][drafts]") {
  const std::uint32_t near = GENERATE(0u, 90u);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  Story story(shape, 60, 600, drafts::kPageTokens);
  const EngineOptions options = draft_options(rig, shape, 4, 1, near);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 50);
  story.poison(1, 52);
  const auto rows = run(engine, rig, options.largest, {{&teller, 4}})[0];
  const std::size_t floats = std::size_t{shape.q_heads} * shape.head_dim;
  for (std::uint32_t i = 0; i < 4; ++i) {
    for (std::size_t at = 0; at < rows[i].out.size(); ++at)
      REQUIRE(std::isnan(rows[i].out[at]) == (i >= 2 && at / floats == 1));
  }
}

TEST_CASE("buckets of single tokens, of drafts and of both run after one another", "[engine][drafts]") {
  const std::uint32_t near = GENERATE(0u, 6u, 60u);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story(shape, 200, 610, drafts::kPageTokens);
  EngineOptions options = draft_options(rig, shape, 8, 2, near);
  options.largest.prefill_rows = 20;
  options.largest.prefills = 1;
  options.largest.trace = true;
  const EngineMemoryUse needed = memory_needed(options, rig.device.get());
  Engine engine(options, rig.device);
  REQUIRE(engine.memory().pinned == needed.pinned);
  REQUIRE(engine.memory().buffers == needed.buffers);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=6 | near=0,sinks=2,recent=3"))};
  Teller prompt{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 100);
  Random random(611);
  while (teller.at + 16 <= story.tokens()) {
    const std::uint32_t drafts = 1 + random.below(8);
    // Several teams of one sequence follow one another.
    const std::uint32_t count = 1 + random.below(2 * drafts);
    const Bucket bucket{.decode_rows = 2 * drafts,
                        .drafts = drafts,
                        .prefill_rows = 9,
                        .prefills = 1,
                        .unbounded = true,
                        .trace = true};
    ForwardTensors tensors(*rig.device, shape, bucket.rows());
    const std::vector<PlanItem> items{{.sequence = prompt.id, .tokens = 7, .prefill = true},
                                      {.sequence = teller.id, .tokens = count}};
    for (std::uint32_t i = 0; i < 7; ++i) tensors.set(i, story, prompt.at + i);
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(7 + i, story, teller.at + i);
    const Batch batch = run_batch(engine, rig, tensors, items, bucket);
    for (const TraceSpan& span : engine.trace(batch).spans) {
      if (span.stage == Stage::append) REQUIRE(span.rows == 7 + count);
      if (span.stage == Stage::split) REQUIRE(span.rows == div_up(count, drafts));
    }
    for (std::uint32_t i = 0; i < 7 + count; ++i) {
      const std::uint32_t at = i < 7 ? prompt.at + i : teller.at + (i - 7) / drafts * drafts;
      const std::uint32_t of = i < 7 ? 1 : std::min(drafts, teller.at + count - at);
      const Story::Together team{.first = at,
                                 .drafts = of,
                                 .draft = i < 7 ? 0 : (i - 7) % drafts,
                                 .sinks = i < 7 ? at : 2,
                                 .recent = 3,
                                 .picks = i < 7 ? 0u : 6u};
      CAPTURE(drafts, count, teller.at, i);
      REQUIRE(error_of({tensors.out(i), {}}, story, shape, team) < kTolerance);
    }
    prompt.at += 7;
    teller.at += count;
    if (prompt.at + 7 > story.tokens()) engine.truncate(prompt.id, prompt.at = 0);
  }
}

TEST_CASE("buckets and policies that teams cannot serve are refused by name", "[engine][drafts]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  EngineOptions options = draft_options(rig, shape, 4, 2, 0);
  const auto plan = [&](Engine& engine, SequenceId id, std::uint32_t tokens, const Bucket& bucket) {
    const PlanItem item{.sequence = id, .tokens = tokens};
    return code_of([&] { (void)engine.plan({&item, 1}, bucket, rig.stream); });
  };
  options.policies.push_back(parse_policy("magicpig"));
  Engine engine(options, rig.device);
  const SequenceId id = engine.begin(parse_policy("full"));
  REQUIRE(plan(engine, id, 1, {.decode_rows = 6, .drafts = 4, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 1, {.decode_rows = 8, .drafts = 8, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 1, {.decode_rows = 8, .drafts = 0, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 5, {.decode_rows = 4, .drafts = 4, .unbounded = true}) == Errc::invalid_argument);
  SequenceId chooses = engine.begin(parse_policy("topk"));
  REQUIRE(plan(engine, chooses, 5, {.decode_rows = 8, .drafts = 4, .unbounded = true}) == Errc::unsupported);
  REQUIRE(plan(engine, chooses, 2, {.decode_rows = 2, .unbounded = true}) == Errc::unsupported);
  engine.end(chooses);
  chooses = engine.begin(parse_policy("magicpig"));  // A sample is right for one query.
  REQUIRE(plan(engine, chooses, 1, {.decode_rows = 4, .drafts = 4, .unbounded = true}) == Errc::unsupported);
  options.largest.drafts = 9;  // Of 4 query heads each.
  REQUIRE(code_of([&] { Engine(options, rig.device); }) == Errc::invalid_argument);
}
