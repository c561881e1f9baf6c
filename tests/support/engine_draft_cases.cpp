// Drafts that are verified together attend what each of them would, or more.
#include <algorithm>
#include <cmath>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Query heads of a KV head, and how many drafts are verified together.
struct Size {
  std::uint32_t group;
  std::uint32_t drafts;
};

AttentionShape shape_of(std::uint32_t group, std::uint32_t layers = 3) {
  return {.layers = layers, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 64};
}

/// Teams of `drafts` for `teams` sequences of 8 tokens a page.
EngineOptions draft_options(const EngineRig& rig, const AttentionShape& shape, std::uint32_t drafts,
                            std::uint32_t teams, std::uint32_t near) {
  EngineOptions options{.shape = shape,
                        .page_tokens = 8,
                        .kv_dtype = rig.kv_dtype,
                        .largest = {.decode_rows = drafts * teams, .drafts = drafts, .unbounded = true},
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 90 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.sequences = 8;
  options.import_rows = 100;
  return options;
}

/// Some new tokens of a sequence.
struct Part {
  Teller* teller;
  std::uint32_t count;
};
struct Row {
  std::vector<float> out, lse;
};

/// A forward of these in a bucket; the rows of each, and padding behind them, which must be 0.
std::vector<std::vector<Row>> run(Engine& engine, const EngineRig& rig, const Bucket& bucket,
                                  const std::vector<Part>& parts) {
  ForwardTensors tensors(*rig.device, engine.options().shape, bucket.rows());
  std::vector<PlanItem> items;
  std::uint32_t at = 0;
  for (const auto& [teller, count] : parts) {
    items.push_back({.sequence = teller->id, .tokens = count});
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(at++, *teller->story, teller->at + i);
  }
  tensors.spoil();
  const Batch batch = engine.plan(items, bucket, rig.stream);
  tensors.attend(engine, bucket, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  for (std::uint32_t row = at; row < bucket.rows(); ++row) {
    for (const float x : tensors.out(row)) REQUIRE(x == 0.f);
    for (const float x : tensors.lse(row)) REQUIRE(x == -INFINITY);
  }
  std::vector<std::vector<Row>> rows;
  at = 0;
  for (const auto& [teller, count] : parts) {
    rows.emplace_back();
    for (std::uint32_t i = 0; i < count; ++i, ++at) rows.back().push_back({tensors.out(at), tensors.lse(at)});
    teller->at += count;
  }
  return rows;
}

/// Against the reference, all layers of a row of a team.
double error_of(const Row& row, const Story& story, const AttentionShape& shape, const Story::Together& team) {
  double error = 0.0;
  const std::size_t floats = std::size_t{shape.q_heads} * shape.head_dim;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<double> want = story.attended_together(layer, team);
    for (std::size_t i = 0; i < floats; ++i) {
      const double off = std::abs(want[i] - row.out[layer * floats + i]);
      error = std::isnan(off) ? INFINITY : std::max(error, off);
    }
  }
  return error;
}

constexpr double kTolerance = 1e-3;

}  // namespace

TEST_CASE("rows of a team that attend everything get what they get alone", "[engine][drafts]") {
  const Size size = GENERATE(Size{4, 2}, Size{4, 8}, Size{1, 32}, Size{8, 3}, Size{32, 1});
  const std::uint32_t near = GENERATE(0u, 5u, 90u);
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  // In the middle of a page, to its end, nothing before it.
  const std::uint32_t tokens = GENERATE(0u, 1u, 37u, 64u, 126u);
  CAPTURE(size.group, size.drafts, near, static_cast<int>(placement), tokens);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(size.group);
  const Story story(shape, tokens + 3 * size.drafts, 500 + tokens);
  EngineOptions options = draft_options(rig, shape, size.drafts, 1, near);
  options.placement = placement;
  options.windows = {0, 5, 40};  // Shorter than some teams, and longer.
  Engine engine(options, rig.device);
  const auto begin = [&] {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
    import_story(engine, rig, teller, tokens);
    return teller;
  };
  Teller alone = begin();
  std::vector<Row> want;
  while (alone.at < story.tokens())
    want.push_back(run(engine, rig, {.decode_rows = 1, .unbounded = true}, {{&alone, 1}})[0][0]);
  Teller teller = begin();
  for (const std::uint32_t count : {size.drafts, (size.drafts + 1) / 2, size.drafts, 1u}) {
    const std::uint32_t first = teller.at;
    const std::vector<Row> rows = run(engine, rig, options.largest, {{&teller, count}})[0];
    for (std::uint32_t i = 0; i < count; ++i) {
      CAPTURE(first, i);
      REQUIRE(difference(rows[i].out, want[first - tokens + i].out) < rig.tolerance);
      REQUIRE(difference(rows[i].lse, want[first - tokens + i].lse) < rig.tolerance);
    }
    if (teller.at + size.drafts > story.tokens()) break;
  }
}

TEST_CASE("a team attends what any of its heads chose, near or far, and no row newer tokens", "[engine][drafts]") {
  struct Case {
    const char* text;
    std::uint32_t sinks, recent, picks;
  };
  const Case policy = GENERATE(Case{"none | near=0,sinks=4,recent=9", 4, 9, 0},
                               Case{"exact | int4 | top_k=7 | near=0,sinks=3,recent=1", 3, 1, 7},
                               Case{"exact | int4 | top_k=12 | near=0,sinks=2,recent=20", 2, 20, 12});
  const Size size = GENERATE(Size{4, 3}, Size{8, 4}, Size{1, 16});
  const std::uint32_t near = GENERATE(0u, 7u, 90u);
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  CAPTURE(policy.text, size.group, size.drafts, near, static_cast<int>(placement));
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(size.group);
  Story story(shape, 260, 520), other(shape, 120, 521);
  EngineOptions options = draft_options(rig, shape, size.drafts, 2, near);
  options.placement = placement;
  options.windows = {0, 30, 0};
  story.see(options.windows);
  other.see(options.windows);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy.text))};
  Teller mate{.story = &other, .id = engine.begin(parse_policy(policy.text))};
  import_story(engine, rig, teller, 190);
  import_story(engine, rig, mate, 2);  // All of it is sinks at first.
  for (std::uint32_t step = 0; step < 4; ++step) {
    const std::uint32_t count = step % 2 == 0 ? size.drafts : size.drafts - 1;
    const std::vector<Part> parts{{&mate, count}, {&teller, size.drafts}};
    const std::vector<std::uint32_t> firsts{mate.at, teller.at};
    const auto rows = run(engine, rig, options.largest, parts);
    for (std::size_t p = 0; p < 2; ++p) {
      const auto drafts = static_cast<std::uint32_t>(rows[p].size());
      for (std::uint32_t i = 0; i < drafts; ++i) {
        CAPTURE(step, p, firsts[p], i);
        const Story::Together team{.first = firsts[p],
                                   .drafts = drafts,
                                   .draft = i,
                                   .sinks = policy.sinks,
                                   .recent = policy.recent,
                                   .picks = policy.picks};
        REQUIRE(error_of(rows[p][i], *parts[p].teller->story, shape, team) < kTolerance);
      }
    }
  }
}

TEST_CASE("an audit finds that rows of a team attend no less than by themselves", "[engine][drafts]") {
  struct Case {
    const char* text;
    double share;  ///< 0: no less than alone
  };
  const Case policy = GENERATE(Case{"exact | int4 | top_k=9 | near=0,sinks=2,recent=6", 0.0},
                               Case{"exact | int4 | top_k=12% | near=0,sinks=2,recent=6", 0.0},
                               Case{"pages:share=0.2,min_pages=3 | top_k=all | near=0,sinks=2", 0.0},
                               Case{"pages:share=0.3 | int4 | top_k=11 | near=0,sinks=2", 0.0},
                               Case{"exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", 0.8},
                               Case{"full", 1.0});
  const std::uint32_t near = GENERATE(0u, 7u, 90u);
  CAPTURE(policy.text, near);
  constexpr std::uint32_t kDrafts = 5;
  constexpr std::uint32_t kPrompt = 181;  // Pages end within teams.
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story(shape, kPrompt + 4 * kDrafts, 530);
  EngineOptions options = draft_options(rig, shape, kDrafts, 1, near);
  options.largest.audit = true;
  make_room_for(parse_policy(policy.text), story.tokens(), options);
  options.windows = {0, 0, 30};
  const auto audit = [&](std::uint32_t drafts) {
    Engine engine(options, rig.device);
    Bucket bucket = options.largest;
    bucket.drafts = drafts;
    Teller teller{.story = &story, .id = engine.begin(parse_policy(policy.text))};
    import_story(engine, rig, teller, kPrompt);
    // The last team is not whole.
    for (const std::uint32_t count : {kDrafts, kDrafts, kDrafts, kDrafts - 2})
      (void)run(engine, rig, bucket, {{&teller, count}});
    return engine.audit(teller.id);
  };
  const AuditReport alone = audit(1);
  const AuditReport together = audit(kDrafts);
  REQUIRE(together.tokens == 4 * kDrafts - 2);
  REQUIRE(together.dense_tokens == alone.dense_tokens);
  REQUIRE(together.attended_tokens >= alone.attended_tokens);
  REQUIRE(together.heads.size() == alone.heads.size());
  for (std::size_t h = 0; h < alone.heads.size(); ++h) {
    CAPTURE(h);
    REQUIRE(together.heads[h].steps == 4 * kDrafts - 2);
    REQUIRE(together.heads[h].bound_broken == 0);
    REQUIRE(together.heads[h].coverage_min > (policy.share == 0.0 ? alone.heads[h].coverage_min : policy.share) - 5e-3);
    REQUIRE(together.heads[h].overlap > alone.heads[h].overlap - (policy.share == 0.0 ? 1e-9 : 0.05));
  }
}

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
    const Story story(shape, 90, 550 + seed), wrong(shape, 90, 570 + seed);
    const SequenceId id = engine.begin(parse_policy("exact | int4 | top_k=6 | near=0,sinks=2,recent=3"));
    Teller teller{.story = &story, .id = id};
    import_story(engine, rig, teller, random.below(20));
    while (teller.at + kDrafts <= story.tokens()) {
      // The first `right` drafts are the story's; a page may end among any of them.
      const std::uint32_t count = 1 + random.below(kDrafts);
      const std::uint32_t right = 1 + random.below(count);
      const std::uint32_t first = teller.at;
      Story mixed(shape, 90, 590);
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

TEST_CASE("a draft that is no number spoils what comes behind it, and nothing before", "[engine][drafts]") {
  const std::uint32_t near = GENERATE(0u, 90u);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  Story story(shape, 60, 600);
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
  const Story story(shape, 200, 610);
  EngineOptions options = draft_options(rig, shape, 8, 2, near);
  options.largest.prefill_rows = 20;
  options.largest.prefills = 1;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=6 | near=0,sinks=2,recent=3"))};
  Teller prompt{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 100);
  Random random(611);
  while (teller.at + 16 <= story.tokens()) {
    const std::uint32_t drafts = 1 + random.below(8);
    // Several teams of one sequence follow one another.
    const std::uint32_t count = 1 + random.below(2 * drafts);
    const Bucket bucket{.decode_rows = 2 * drafts, .drafts = drafts, .prefill_rows = 9, .prefills = 1, .unbounded = true};
    ForwardTensors tensors(*rig.device, shape, bucket.rows());
    const std::vector<PlanItem> items{{.sequence = prompt.id, .tokens = 7, .prefill = true},
                                      {.sequence = teller.id, .tokens = count}};
    for (std::uint32_t i = 0; i < 7; ++i) tensors.set(i, story, prompt.at + i);
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(7 + i, story, teller.at + i);
    tensors.spoil();
    const Batch batch = engine.plan(items, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    engine.finish(batch);
    rig.synchronize();
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
  options.cpu_sequences = 1;
  make_room_for(parse_policy("topk"), 100, options);
  Engine engine(options, rig.device);
  const SequenceId id = engine.begin(parse_policy("full"));
  REQUIRE(plan(engine, id, 1, {.decode_rows = 6, .drafts = 4, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 1, {.decode_rows = 8, .drafts = 8, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 1, {.decode_rows = 8, .drafts = 0, .unbounded = true}) == Errc::invalid_argument);
  REQUIRE(plan(engine, id, 5, {.decode_rows = 4, .drafts = 4, .unbounded = true}) == Errc::invalid_argument);
  const SequenceId chooses = engine.begin(parse_policy("topk"));
  REQUIRE(plan(engine, chooses, 1, {.decode_rows = 4, .drafts = 4, .unbounded = true}) == Errc::unsupported);
  options.largest.drafts = 9;  // Of 4 query heads each.
  REQUIRE(code_of([&] { Engine(options, rig.device); }) == Errc::invalid_argument);
}
